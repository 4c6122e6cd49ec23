"""Parameters, bytes and FLOPs of a Config, without building the model."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from course_lib.model.config import Config
from course_lib.model.decoder import ATTENTION
from course_lib.model.ffn import SwiGLU

__all__ = [
    "ParameterCount",
    "cache_bytes",
    "cache_values",
    "count_parameters",
    "forward_flops",
    "numel",
]


def numel(module: nn.Module) -> int:
    """Parameters of a module, a shared one once. Module 12."""
    return sum(p.numel() for p in module.parameters())


@dataclass(frozen=True)
class ParameterCount:
    """Weights by role; `total` and `active` (what one token meets). Module 12."""

    embedding: int
    attention: int
    norms: int
    dense_ffn: int
    router: int
    routed: int
    shared: int
    head: int  # 0 when tied to the embedding
    routed_active: int  # k of the E routed experts in each MoE layer

    @property
    def total(self) -> int:
        """Every weight once."""
        return (
            self.embedding
            + self.attention
            + self.norms
            + self.dense_ffn
            + self.router
            + self.routed
            + self.shared
            + self.head
        )

    @property
    def active(self) -> int:
        """Only the routed experts are reduced to k of E; everything else counts in full."""
        return self.total - self.routed + self.routed_active


def meta_attention(cfg: Config) -> nn.Module:
    """The attention of a layer without memory for its weights: sizes can be read off."""
    with torch.device("meta"):
        return ATTENTION[type(cfg.attention)](cfg)


def swiglu_parameters(d_model: int, width: int) -> int:
    with torch.device("meta"):
        return numel(SwiGLU(d_model, width))


def count_parameters(cfg: Config) -> ParameterCount:
    """Every weight of ModernDecoder(cfg), by role. Module 12."""
    L, moe = cfg.n_layers, cfg.n_moe_layers
    expert = swiglu_parameters(cfg.d_model, cfg.d_expert)
    return ParameterCount(
        embedding=cfg.vocab_size * cfg.d_model,
        attention=L * numel(meta_attention(cfg)),
        norms=(2 * L + 1) * cfg.d_model,
        dense_ffn=(L - moe) * swiglu_parameters(cfg.d_model, cfg.d_ff),
        router=moe * cfg.d_model * cfg.n_experts,
        routed=moe * cfg.n_experts * expert,
        shared=moe * cfg.n_shared_experts * expert,
        head=0 if cfg.tied else cfg.vocab_size * cfg.d_model,
        routed_active=moe * cfg.n_experts_active * expert,
    )


def cache_values(cfg: Config) -> int:
    """Numbers that one token leaves in the cache of one layer. Module 09."""
    return sum(math.prod(shape) for shape in meta_attention(cfg).cache_spec().values())


def cache_bytes(
    cfg: Config, tokens: int, batch: int = 1, dtype: torch.dtype = torch.bfloat16
) -> int:
    """batch * tokens * layers * values a token and layer * bytes a value.

    For GQA the values are 2 * K * h; a sliding window keeps at most its width. Module 09."""
    window = getattr(cfg.attention, "window", None)
    kept = tokens if window is None else min(tokens, window)
    return batch * kept * cfg.n_layers * cache_values(cfg) * dtype.itemsize


def forward_flops(cfg: Config, T: int, S: int | None = None) -> int:
    """Multiply-adds, counted as 2, of a forward pass of T tokens that see S keys each.

    Matrix products only: 2 a token for each weight met (the embedding is looked up, not
    multiplied), and 2 T S H (score width + value width) a layer for full scores. Module 13."""
    S = T if S is None else S
    count, attention = count_parameters(cfg), meta_attention(cfg)
    norms = count.norms + cfg.n_layers * norm_weights(attention)
    head = cfg.vocab_size * cfg.d_model  # multiplied also where it is the embedding
    met = count.active - count.embedding - count.head - norms + head
    scores = 2 * T * S * cfg.n_heads * sum(attention.score_widths()) * cfg.n_layers
    return 2 * T * met + scores


def norm_weights(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.dim() == 1)
