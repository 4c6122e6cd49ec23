"""Attention: every token gathers values from the tokens before it.

A variant is a module with `forward(x, cos, sin, cache=None, mask=None)`,
`cache_spec()` and `score_widths()`. `cache.update(k, v)` stores what is new and returns
all so far; any object with it will do. `mask` is True where a query may see a key; None
means causal over the keys there are.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import Config
from .masks import additive, alibi_bias, causal_mask, narrow
from .norm import RMSNorm
from .position import ALiBi
from .rope import rotation
from .tap import Tap


def softmax_of_allowed(scores: Tensor, sink: Tensor | None = None) -> Tensor:
    """Softmax over keys in float32; a row that may see nothing gives zeros, never NaN.

    scores (B, H, T, S). A sink, one logit a head (H,), joins the denominator only, so
    that the weights sum to less than 1. Source of sinks: gpt-oss, arXiv 2508.10925.
    Module 10."""
    scores = scores.float()
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(nothing, 0)
    if sink is not None:
        column = sink.float().view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(-1)
    return weights[..., : -1 if sink is not None else None].masked_fill(nothing, 0)


class AttentionCore(nn.Module):
    """softmax(q k^T * scale + mask) v, query head h reading key/value head h // group.

    q (B, H, T, h), k (B, K, S, h), v (B, K, S, w) to (B, H, T, w). Two forms, equal:
    "sdpa" is torch's fused kernel, "explicit" makes the scores that one can look at.
    `widths` are the letters of a key's and a value's width in the Taps.
    Source: Vaswani et al., arXiv 1706.03762, equation 1. Module 08."""

    def __init__(self, cfg: Config, scale: float, widths: tuple = ("h", "h")):
        super().__init__()
        self.scale = scale
        self.window = getattr(cfg.attention, "window", None)
        self.form = cfg.attention.form
        self.alibi = isinstance(cfg.position, ALiBi)
        sinks = getattr(cfg.attention, "sinks", False)
        self.sinks = nn.Parameter(torch.zeros(cfg.n_heads)) if sinks else None
        self.see_k, self.see_v = (Tap(f"B H S {width}") for width in widths)
        self.see_scores, self.see_weights = Tap("B H T S"), Tap("B H T S")

    def bias(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor | None:
        """What is allowed or added, broadcast over (B, H, T, S); None: causal."""
        H, T, S = q.shape[1], q.shape[-2], k.shape[-2]
        mask = narrow(mask, T, S, self.window, q.device)
        if self.alibi:
            slopes = alibi_bias(H, T, S, q.device).to(q.dtype)
            return slopes if mask is None else slopes + additive(mask, q.dtype)
        if mask is None and T != S and T > 1:  # a chunk after cached tokens
            mask = causal_mask(T, S, device=q.device)
        return mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None):
        if self.makes_scores:
            return self.explicit(q, k, v, mask)
        bias = self.bias(q, k, mask)
        # is_causal is aligned to the upper left: right only for a square of scores
        square = bias is None and q.shape[-2] > 1
        return F.scaled_dot_product_attention(
            q, k, v, bias, is_causal=square, scale=self.scale, enable_gqa=True
        )

    @property
    def makes_scores(self) -> bool:
        """Whether `forward` goes the explicit way, the only one that knows sinks."""
        return self.form == "explicit" or self.sinks is not None

    def explicit(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None):
        """As `forward`, with the scores made: (B, H, T, S) in memory."""
        group = q.shape[1] // k.shape[1]
        # repeat each head in place (0 0 1 1), not tiled (0 1 0 1); this copies
        k = self.see_k(k.repeat_interleave(group, dim=1))
        v = self.see_v(v.repeat_interleave(group, dim=1))
        bias = self.bias(q, k, mask)
        if bias is None:
            bias = causal_mask(q.shape[-2], k.shape[-2], device=q.device)
        scores = (q @ k.transpose(-2, -1)).float() * self.scale + additive(bias)
        weights = softmax_of_allowed(self.see_scores(scores), self.sinks)
        return self.see_weights(weights).to(v.dtype) @ v

    def extra_repr(self) -> str:
        return f"scale={self.scale:.4g}, window={self.window}, form={self.form!r}"


def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """The heads of each token apart: (B, T, n h) to (B, n, T, h). Module 09."""
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """The heads of a token side by side again: (B, n, T, h) to (B, T, n h).

    Module 09."""
    return x.transpose(1, 2).flatten(2)


class GroupedQueryAttention(nn.Module):
    """H query heads share K key/value heads, and only those K are cached.

    x (B, T, D) to (B, T, D): project, QK-Norm per head, RoPE on q and k (never on v),
    cache, attend, concatenate, W_o. K = H is multi-head, K = 1 multi-query attention.
    Sources: Ainslie et al., arXiv 2305.13245, section 2.2; QK-Norm: arXiv 2010.04245.
    Module 09."""

    def __init__(self, cfg: Config, layer: int = 0):
        super().__init__()
        self.H, self.H_kv, self.d_head = cfg.n_heads, cfg.n_kv_heads, cfg.d_head
        self.group_size = cfg.group_size
        self.W_q = nn.Linear(cfg.d_model, self.H * self.d_head, bias=False)
        self.W_k = nn.Linear(cfg.d_model, self.H_kv * self.d_head, bias=False)
        self.W_v = nn.Linear(cfg.d_model, self.H_kv * self.d_head, bias=False)
        self.W_o = nn.Linear(self.H * self.d_head, cfg.d_model, bias=False)
        qk_norm = cfg.attention.qk_norm
        self.q_norm = RMSNorm(self.d_head, cfg.norm_eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.d_head, cfg.norm_eps) if qk_norm else nn.Identity()
        self.rotate = rotation(cfg.position, layer)
        self.core = AttentionCore(cfg, scale=1 / math.sqrt(self.d_head))
        self.see_q, self.see_q_rotated = Tap("B H T h"), Tap("B H T h")
        self.see_k, self.see_k_rotated = Tap("B K T h"), Tap("B K T h")
        self.see_v, self.see_heads = Tap("B K T h"), Tap("B H T h")
        self.see_concat = Tap("B T Hh")

    def cache_spec(self) -> dict[str, tuple[int, ...]]:
        """What one token leaves behind in this layer: name to shape."""
        return {"k": (self.H_kv, self.d_head), "v": (self.H_kv, self.d_head)}

    def score_widths(self) -> tuple[int, int]:
        """Width of a head's dot products, and of what the weights then sum."""
        return self.d_head, self.d_head

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache=None, mask=None
    ) -> Tensor:
        q = self.see_q(split_heads(self.W_q(x), self.H))
        k = self.see_k(split_heads(self.W_k(x), self.H_kv))
        v = self.see_v(split_heads(self.W_v(x), self.H_kv))
        q = self.see_q_rotated(self.rotate(self.q_norm(q), cos, sin))
        k = self.see_k_rotated(self.rotate(self.k_norm(k), cos, sin))
        if cache is not None:
            k, v = cache.update(k, v)  # the K heads, before they are shared out
        heads = self.see_heads(self.core(q, k, v, mask))
        return self.W_o(self.see_concat(merge_heads(heads)))
