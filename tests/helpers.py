"""What many tests share: portable numbers, a small decoder, its variants, its chunked run."""

import torch

from course_lib import (
    GQA,
    MLA,
    NTK,
    ALiBi,
    Config,
    Interpolation,
    Llama3,
    ModernDecoder,
    Rope,
    Router,
    YaRN,
    new_caches,
)
from course_lib.model import RotaryTable

SMALL = dict(
    vocab_size=41,
    d_model=24,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    d_head=8,
    d_ff=20,
    n_experts=6,
    d_expert=12,
    max_seq_len=40,
)

# every choice that a Config offers, one or two at a time
VARIANTS = {
    "default": {},
    "multi-head": dict(n_kv_heads=4),
    "multi-query": dict(n_kv_heads=1),
    "dense": dict(n_experts=0),
    "experts everywhere": dict(first_k_dense=0),
    "no shared expert": dict(n_shared_experts=0),
    "two shared experts": dict(n_shared_experts=2),
    "untied": dict(tied=False),
    "no QK-Norm": dict(attention=GQA(qk_norm=False)),
    "explicit": dict(attention=GQA(form="explicit")),
    "window": dict(attention=GQA(window=3)),
    "window of one": dict(attention=GQA(window=1)),
    "window, explicit": dict(attention=GQA(window=3, form="explicit")),
    "sinks": dict(attention=GQA(sinks=True)),
    "sinks and window": dict(attention=GQA(sinks=True, window=4)),
    "MLA absorbed": dict(attention=MLA(16, 4, 8, 6)),
    "MLA naive": dict(attention=MLA(16, 4, 8, 6, form="naive")),
    "MLA low-rank queries": dict(attention=MLA(16, 4, 8, 6, q_lora_rank=10)),
    "MLA interleaved": dict(attention=MLA(16, 4, 8, 6), position=Rope("interleaved")),
    "ALiBi": dict(position=ALiBi()),
    "ALiBi, window, explicit": dict(position=ALiBi(), attention=GQA(window=3, form="explicit")),
    "interleaved": dict(position=Rope("interleaved")),
    "partial": dict(position=Rope(fraction=0.5)),
    "proportional": dict(position=Rope(fraction=0.5, proportional=True)),
    "no rotation every second": dict(position=Rope(nope_every=2)),
    "Interpolation": dict(position=Rope(scaling=Interpolation(4.0))),
    "NTK": dict(position=Rope(scaling=NTK(4.0))),
    "YaRN": dict(position=Rope(scaling=YaRN(4.0, original_length=16))),
    "Llama3": dict(position=Rope(scaling=Llama3(4.0, original_length=16))),
    "softmax_all": dict(router=Router("softmax_all")),
    "softmax_all, one expert": dict(router=Router("softmax_all"), n_experts_active=1),
    "softmax_renormalized": dict(router=Router("softmax_renormalized")),
    "sigmoid": dict(router=Router("sigmoid", scaling=2.5)),
    "sigmoid as it is": dict(router=Router("sigmoid", normalize=False)),
    "sigmoid, bias, groups": dict(router=Router("sigmoid", True, n_groups=3, n_groups_active=2)),
    "loop": dict(router=Router(form="loop")),
}


def R(shape, a: int) -> torch.Tensor:
    """Portable numbers, exact also in bfloat16: i-th value (((a i + i^2) mod 31) - 15) / 16."""
    i = torch.arange(torch.Size(shape).numel())
    return ((((a * i + i * i) % 31) - 15) / 16).view(shape)


def numbers(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def close(got, right, atol=1e-5):
    """Assert equality within an absolute tolerance, shapes included."""
    right = torch.as_tensor(right, dtype=torch.float64)
    torch.testing.assert_close(torch.as_tensor(got).double(), right, atol=atol, rtol=0)


def differs(wrong, right, by=1e-3):
    """Assert that a wrong variant is far from the right values: the check tells them apart."""
    gap = (torch.as_tensor(wrong).double() - torch.as_tensor(right).double()).abs().max()
    assert not gap <= by, f"the wrong variant is only {gap} away"  # NaN is far


def small(**changes) -> Config:
    return Config(**SMALL | changes)


def jittered(cfg: Config, seed: int = 0, dtype=torch.float32) -> ModernDecoder:
    """A decoder in which nothing is neutral: gains are not 1, sinks and biases not 0."""
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        model = ModernDecoder(cfg, init=None)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            gain = tensor.dim() == 1 and ("norm" in name or name.endswith("W_q.1.weight"))
            noise = torch.randn(tensor.shape, generator=draw)
            tensor.copy_(1 + 0.3 * noise if gain else 0.25 * noise)
    return model.to(dtype).eval()


def ids_of(cfg: Config, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(cfg.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def chunked(model: ModernDecoder, ids, split, attention_mask=None, caches=None) -> torch.Tensor:
    """Logits of every position, the tokens fed through caches in chunks of `split`."""
    caches = new_caches(model) if caches is None else caches
    out, P = [], 0
    for chunk in ids.split(split, dim=1):
        mask = None if attention_mask is None else attention_mask[:, : P + chunk.shape[1]]
        out.append(model(chunk, caches, P, mask)[0])
        P += chunk.shape[1]
    return torch.cat(out, dim=1)


def table(d: int, positions, theta: float = 10000.0, **rope):
    """cos and sin of the library for a head of width d."""
    cfg = Config(d_head=d, rope_theta=theta, position=Rope(**rope))
    return RotaryTable(cfg)(torch.as_tensor(positions))
