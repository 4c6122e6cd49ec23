"""The whole decoder, the map to start from: ids -> embed -> blocks -> norm -> head."""

import torch
from torch import Tensor, nn

from .attention import GroupedQueryAttention
from .checks import require
from .config import Config
from .ffn import SwiGLU
from .inputs import (
    check_caches,
    check_ids,
    check_pos_offset,
    check_specs,
    known_padding,
)
from .masks import padded_causal_mask, positions_of
from .mla import MultiHeadLatentAttention
from .moe import MoE
from .norm import RMSNorm
from .parts import GQA, MLA
from .rope import RotaryTable
from .tap import Tap

ATTENTION = {GQA: GroupedQueryAttention, MLA: MultiHeadLatentAttention}


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)): the stream is never normalised.

    x (B, T, D) to (x (B, T, D), router_logits (N, E), or None in a dense block).
    Source: pre-norm, Xiong et al., arXiv 2002.04745. Module 06."""

    def __init__(self, cfg: Config, layer: int = 0):
        super().__init__()
        self.is_moe = cfg.is_moe(layer)
        self.norm1 = RMSNorm(cfg.d_model, cfg.norm_eps)
        self.attn = ATTENTION[type(cfg.attention)](cfg, layer)
        self.norm2 = RMSNorm(cfg.d_model, cfg.norm_eps)
        self.ffn = MoE(cfg) if self.is_moe else SwiGLU(cfg.d_model, cfg.d_ff)
        self.see_after_attn, self.see_after_ffn = Tap("B T D"), Tap("B T D")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache=None, mask=None):
        x = self.see_after_attn(x + self.attn(self.norm1(x), cos, sin, cache, mask))
        out = self.ffn(self.norm2(x))
        out, router_logits = out if self.is_moe else (out, None)
        return self.see_after_ffn(x + out), router_logits


def init_weights(module: nn.Module):
    """Draw every Linear and Embedding weight from N(0, 0.02): the first loss is then
    near ln V nats. Module 13."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, mean=0.0, std=0.02)


class ModernDecoder(nn.Module):
    """A decoder-only Transformer: token ids (B, T) to logits (B, T, V).

    `init` is applied to every module; None keeps torch's default weights (the first
    loss is then far from ln V). Raises ValueError for anything but a Config. Sources:
    the parts name theirs; tied head: Press and Wolf, arXiv 1608.05859. Module 16."""

    def __init__(self, cfg: Config, init=init_weights):
        super().__init__()
        require(
            isinstance(cfg, Config),
            f"cfg={cfg!r} is no Config.",
            "Give the sizes as one, for example ModernDecoder(Config(n_layers=2)).",
        )
        self.cfg = cfg
        self.rope = RotaryTable(cfg)
        self.embed = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.blocks = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.n_layers))
        self.norm_f = RMSNorm(cfg.d_model, cfg.norm_eps)
        self.lm_head = nn.Linear(cfg.d_model, cfg.vocab_size, bias=False)
        self.tie()
        if init is not None:
            self.apply(init)

    def forward(
        self,
        ids: Tensor,
        caches: list | None = None,
        pos_offset: int = 0,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits (B, T, V) and the router logits (N, E) of each MoE layer.

        With caches, one a layer, ids are the T tokens after the P cached ones and
        pos_offset is P; without, it only shifts the positions and P is 0.
        attention_mask (B, P + T) is True at real tokens; the positions of a row count
        from its first. Raises ValueError before anything is written."""
        check_ids(ids, self.cfg)
        positions, mask = self.place(ids, caches, pos_offset, attention_mask)
        cos, sin = self.rope(positions)
        x = self.embed(ids)
        router_logits = []
        for block, cache in zip(self.blocks, caches or self.no_caches(), strict=True):
            x, logits = block(x, cos, sin, cache, mask)
            if logits is not None:
                router_logits.append(logits)
        return self.lm_head(self.norm_f(x)), router_logits

    def place(self, ids, caches, pos_offset, attention_mask):
        """Where the T new tokens stand and what they may see; refuses what cannot be.

        Positions are (T,), mask None; with padding (B, 1, T) and (B, 1, T, P + T)."""
        T = ids.shape[1]
        check_pos_offset(pos_offset)
        check_caches(caches, pos_offset, ids, self.cfg)
        check_specs(caches, [block.attn.cache_spec() for block in self.blocks])
        P = pos_offset if caches else 0
        real = known_padding(caches, attention_mask, ids, P)
        if real is None:
            first, last = pos_offset, pos_offset + T - 1
            positions, mask = torch.arange(first, last + 1, device=ids.device), None
        else:
            counted = positions_of(real)[:, -T:].unsqueeze(1)
            positions = counted + (pos_offset - P)
            mask, last = padded_causal_mask(real, T), int(positions.max())
        require(
            last < self.cfg.max_seq_len,
            f"pos_offset={pos_offset} and T={T} reach position {last}, but "
            f"max_seq_len={self.cfg.max_seq_len}.",
            f"Positions end at {self.cfg.max_seq_len - 1}: shorten the input or build "
            "the model with a larger max_seq_len.",
        )
        for cache in caches or []:
            cache.real = real
        return positions, mask

    def no_caches(self) -> list[None]:
        return [None] * len(self.blocks)

    def generate(
        self, prompt_ids, max_new_tokens: int = 20, temperature: float = 0.8, **how
    ):
        """Prompt and continuation; see `course_lib.serving.generate`. Module 14."""
        from course_lib.serving.generate import generate

        return generate(self, prompt_ids, max_new_tokens, temperature, **how)

    def tie(self):
        """Make lm_head's weight the embedding itself, if the Config says so."""
        if self.cfg.tied:
            self.lm_head.weight = self.embed.weight

    def _apply(self, fn, recurse=True):
        # .to(), .to_empty() and .double() may replace parameters one by one: tie again
        super()._apply(fn, recurse)
        self.tie()
        return self

    def load_state_dict(self, state_dict, strict=True, assign=False):
        """As torch's; the head stays tied also with assign=True.

        Raises ValueError for a head of its own in the weights of a tied model."""
        head, embed = (state_dict.get(f"{n}.weight") for n in ("lm_head", "embed"))
        both = head is not None and embed is not None and self.cfg.tied
        require(
            not both or torch.equal(head, embed),
            "tied=True, but lm_head.weight differs from embed.weight in these weights.",
            "They come from an untied model: build this one with Config(tied=False).",
        )
        result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        self.tie()
        return result
