"""Module 09's own computations: heads shared out, bytes of caches, intensity, heads pooled."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from course_lib.model import MLA, Config, GroupedQueryAttention, ModernDecoder
from course_lib.model.checks import divisors, require
from course_lib.teaching.swapping import share
from course_lib.teaching.wrong import StepByStep
from course_lib.training import next_token_loss
from course_lib.zoo.configs import (
    CachedLayers,
    Published,
    cached_layers,
    kv,
    published_cache_bytes,
)
from course_lib.zoo.counts import cache_values, meta_attention

# --- sharing heads ----------------------------------------------------------------------------


def group_of(H: int, K: int) -> int:
    """Query heads that share a key/value head. Raises ValueError. Module 09."""
    require(
        K <= H and H % K == 0,
        f"K={K} does not divide H={H}.",
        f"Each key/value head serves the same number of query heads: choose K from {divisors(H)}.",
    )
    return H // K


def read_by(H: int, K: int, tiled: bool = False) -> list[int]:
    """The key/value head that each query head reads: h // g, or h % K where tiled. Module 09."""
    g = group_of(H, K)
    return [h % K if tiled else h // g for h in range(H)]


def tile_heads(kv_heads: Tensor, H: int) -> Tensor:
    """The wrong expansion 0 1 0 1: (B, K, S, h) to (B, H, S, h). Module 09."""
    return kv_heads.repeat(1, H // kv_heads.shape[1], 1, 1)


def storage(tensor: Tensor) -> int:
    """Bytes of the memory that a tensor looks at, its own or another's. Module 09."""
    return tensor.untyped_storage().nbytes()


def relative_error(wrong: Tensor, right: Tensor) -> float:
    """Length of the difference over the length of what is right. Module 09."""
    return ((wrong - right).norm() / right.norm()).item()


# --- several devices --------------------------------------------------------------------------


def heads_by_device(H: int, K: int, devices: int) -> list[tuple[list[int], list[int]]]:
    """Query heads split evenly, and the key/value heads that they need, for each device.

    Module 09."""
    require(
        H % devices == 0,
        f"devices={devices} does not divide H={H} query heads.",
        f"Choose from {divisors(H)}.",
    )
    reads, n = read_by(H, K), H // devices
    chunks = [list(range(d * n, (d + 1) * n)) for d in range(devices)]
    return [(heads, sorted({reads[h] for h in heads})) for heads in chunks]


# --- bytes and speed of published models ------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """What a data sheet says: bytes, bytes a second, FLOP a second of dense bf16 products.

    Sources: NVIDIA's data sheets of H100 SXM and H200; Ada architecture whitepaper (RTX 4090,
    bf16 with float32 sums). Module 09."""

    name: str
    memory: float
    bandwidth: float
    flops: float

    @property
    def ridge(self) -> float:
        """FLOP a byte from which on the arithmetic, not the memory, sets the pace."""
        return self.flops / self.bandwidth


DEVICES = (
    Device("RTX 4090", 24e9, 1.008e12, 165.2e12),
    Device("H100", 80e9, 3.35e12, 989e12),
    Device("H200", 141e9, 4.8e12, 989e12),
)
VARIANTS = ("as published", "MHA", "GQA 8", "MQA", "MLA 512 + 64")


def head_width(model: Published) -> int | None:
    """Width of a head, of the unrotated part with MLA; None where layers differ."""
    if isinstance(model.attention, MLA):
        return model.attention.d_nope
    return model.d_head


def as_variant(model: Published, variant: str) -> Published:
    """The model with other attention in each layer that has a cache, windows kept. Module 09."""
    if variant == "as published":
        return model
    width, H = head_width(model), model.n_heads
    require(
        width and H,
        f"variant={variant!r}: the layers of {model.name} have heads of several widths.",
        "Choose 'as published'.",
    )
    values = {"MHA": kv(H, width), "GQA 8": kv(min(8, H), width), "MQA": kv(1, width),
              "MLA 512 + 64": 512 + 64}[variant]  # fmt: skip
    layers = tuple(CachedLayers(x.n, values, x.window) for x in cached_layers(model))
    return replace(model, layers=layers)


def weights_read(model: Published, batch: int) -> float:
    """Weights, in billions, that one step of `batch` tokens reads: all of a dense model, of a
    mixture those that at least one token is expected to need if its experts are evenly used.

    From the published totals: active = rest + routed k / E. Module 09."""
    if not model.active:
        return model.total
    share_ = model.n_experts_active / model.n_experts
    routed = (model.total - model.active) / (1 - share_)
    return model.total - routed * (1 - share_) ** batch


def most_requests(model: Published, device: Device, cache: int, weight_bits: int) -> int | None:
    """Requests whose caches fit beside the weights on one device; None: the weights do not."""
    free = device.memory - model.total * 1e9 * weight_bits / 8
    return None if free < 0 else int(free // cache)


def step_bound(model: Published, device: Device, caches: int, batch: int, weight_bits: int):
    """Tokens a second at most, since every step reads the weights and all caches once."""
    read = weights_read(model, batch) * 1e9 * weight_bits / 8 + caches
    return batch * device.bandwidth / read


def bytes_of(model: Published, variant: str, tokens: int, bits: int = 16, windows: bool = True):
    """Bytes of one request's cache under a variant. Module 09."""
    return published_cache_bytes(as_variant(model, variant), tokens, 1, bits, windows)


# --- arithmetic intensity ---------------------------------------------------------------------


def intensity(cfg: Config, value_bytes: int = 2, queries: int = 1) -> float:
    """FLOP of scores and weighted sum for each byte of cache that a decode step reads.

    2 H (score width + value width) FLOP a cached token and query, over the values of that token
    times their bytes; what MLA's naive form spends on expanding is not in it. Module 09."""
    widths = meta_attention(cfg).score_widths()
    return 2 * queries * cfg.n_heads * sum(widths) / (cache_values(cfg) * value_bytes)


def expansion_flops(cfg: Config) -> int:
    """FLOP of U_k c and U_v c for one cached token: what the naive form repeats at each step."""
    part = cfg.attention
    return 2 * part.kv_lora_rank * cfg.n_heads * (part.d_nope + part.d_value)


def attainable(device: Device, intensities: Tensor) -> Tensor:
    """The roofline: FLOP a second at most, min(peak, intensity * bandwidth). Module 09."""
    return (intensities * device.bandwidth).clamp(max=device.flops)


# --- a trained model's heads pooled -----------------------------------------------------------


def pooled(weight: Tensor, old: int, new: int, how: str = "mean") -> Tensor:
    """W_k or W_v (old h, D) with neighbouring heads merged to `new`: their mean, or the first.

    Mean pooling: Ainslie et al., arXiv 2305.13245, section 2.1. Module 09."""
    heads = weight.unflatten(0, (new, group_of(old, new), -1))  # (new, merged, h, D)
    merged = heads.mean(1) if how == "mean" else heads[:, 0]
    return merged.flatten(0, 1)


def with_pooled_heads(
    model: ModernDecoder, n_kv_heads: int, how: str = "mean", layers: Sequence[int] | None = None
) -> ModernDecoder:
    """A decoder on the weights of `model`, in all or some layers with fewer key/value heads.

    `how` is "mean" or "first". The heads are merged and nothing is trained. Module 09."""
    cfg = replace(model.cfg, n_kv_heads=n_kv_heads)
    copy = share(model)
    for i in range(model.cfg.n_layers) if layers is None else layers:
        old = model.blocks[i].attn
        with torch.device("meta"):
            attn = GroupedQueryAttention(cfg, i)
        state = dict(old.state_dict())
        for name in ("W_k.weight", "W_v.weight"):
            state[name] = pooled(state[name], old.H_kv, n_kv_heads, how)
        attn.load_state_dict(state, assign=True)
        copy.blocks[i].attn = attn
    if layers is None:
        copy.cfg = cfg
    return copy


class PooledByRow(StepByStep):
    """Key/value heads shared in another way in each of the four rows of a batch: as they are,
    all their mean, all the first, and tiled.

    A projection and RoPE are linear, so the mean of the heads is the head of the mean weights:
    one pass over the weights shows all four. Module 09."""

    def expand(self, kv: Tensor) -> Tensor:
        """(4, K, S, h) to (4, H, S, h)."""
        trained, averaged, first, tiled = kv
        one_for_all = (self.H, -1, -1)
        return torch.stack([
            trained.repeat_interleave(self.group_size, dim=0),
            averaged.mean(0, keepdim=True).expand(one_for_all),
            first[:1].expand(one_for_all),
            tiled.repeat(self.group_size, 1, 1),
        ])  # fmt: skip


def with_pools_by_row(model: ModernDecoder) -> ModernDecoder:
    """A decoder on the very weights of `model` for batches of four rows, see `PooledByRow`.

    Raises ValueError for QK-Norm, which a mean does not pass through unchanged. Module 09."""
    require(
        not model.cfg.attention.qk_norm,
        "qk_norm=True: the mean of normed keys is not the normed mean.",
        "Use with_pooled_heads, which merges the weights.",
    )
    copy = share(model)
    for block in copy.blocks:
        block.attn.__class__ = PooledByRow
    return copy


@torch.no_grad()
def losses_by_layer(model: ModernDecoder, ids: Tensor, n_kv_heads: int) -> list[float]:
    """Next-token loss with the heads of one layer alone merged, for each layer.

    What stands before that layer is the same for all, so it is run once. Module 09."""
    changed = with_pooled_heads(model, n_kv_heads)
    cos, sin = model.rope(torch.arange(ids.shape[1]))
    x, losses = model.embed(ids), []
    for i, block in enumerate(model.blocks):
        y = changed.blocks[i](x, cos, sin)[0]
        for later in model.blocks[i + 1 :]:
            y = later(y, cos, sin)[0]
        losses.append(next_token_loss(model.lm_head(model.norm_f(y)), ids).item())
        x = block(x, cos, sin)[0]
    return losses


def agreement(weights: Tensor) -> Tensor:
    """How much two heads look at the same tokens: (H, T, T) to (H, H), 0 to 1.

    The mean over queries of the overlap sum_s min(a_s, b_s). Module 09."""
    one, other = weights[:, None], weights[None, :]
    return torch.minimum(one, other).sum(-1).mean(-1)
