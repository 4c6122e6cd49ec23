"""Mistakes on purpose: each class gets one step of the decoder wrong, on the same weights."""

import torch
from torch import Tensor

from course_lib.model.attention import (
    GroupedQueryAttention,
    merge_heads,
    softmax_of_allowed,
    split_heads,
)
from course_lib.model.checks import require
from course_lib.model.decoder import ModernDecoder
from course_lib.model.masks import additive, causal_mask
from course_lib.teaching.swapping import share


class StepByStep(GroupedQueryAttention):
    """The library's attention with a method for each step, equal to it; a mistake overrides one.

    x (B, T, D) to (B, T, D), recorded by the same Taps. Module 16."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache=None, mask=None) -> Tensor:
        q = self.see_q(split_heads(self.W_q(x), self.H))
        k = self.see_k(split_heads(self.W_k(x), self.H_kv))
        v = self.see_v(split_heads(self.W_v(x), self.H_kv))
        q = self.see_q_rotated(self.norm_and_turn(q, self.q_norm, cos, sin))
        k = self.see_k_rotated(self.norm_and_turn(k, self.k_norm, cos, sin))
        v = self.turn_value(v, cos, sin)
        if cache is not None:
            k, v = self.remember(k, v, cache)
        heads = self.see_heads(self.attend(q, k, v, mask))
        return self.W_o(self.see_concat(merge_heads(heads)))

    def norm_and_turn(self, x, norm, cos, sin):
        return self.rotate(norm(x), cos, sin)

    def turn_value(self, v, cos, sin):
        return v

    def remember(self, k, v, cache):
        return cache.update(k, v)

    def expand(self, kv: Tensor) -> Tensor:
        """(B, K, S, h) to (B, H, S, h): 0 0 0 0 1 1 1 1."""
        return kv.repeat_interleave(self.H // kv.shape[1], dim=1)

    def allowed(self, q, k, mask):
        bias = self.core.bias(q, k, mask)
        return causal_mask(q.shape[-2], k.shape[-2]) if bias is None else bias

    def attend(self, q, k, v, mask):
        k, v = self.core.see_k(self.expand(k)), self.core.see_v(self.expand(v))
        scores = (q @ k.transpose(-2, -1)).float() * self.core.scale
        scores = self.core.see_scores(scores + additive(self.allowed(q, k, mask)))
        weights = softmax_of_allowed(scores, self.core.sinks)
        return self.core.see_weights(weights).to(v.dtype) @ v


class RopeOnV(StepByStep):
    """Values are turned as well: what is summed then depends on where it was. Module 16."""

    def turn_value(self, v, cos, sin):
        return self.rotate(v, cos, sin)


class NormAfterRope(StepByStep):
    """RoPE, then QK-Norm: the gain of a channel meets a mix of two channels. Module 16."""

    def norm_and_turn(self, x, norm, cos, sin):
        return norm(self.rotate(x, cos, sin))


class TiledHeads(StepByStep):
    """K/V heads laid out 0 1 0 1, so that query head h reads h % K, not h // group. Module 16."""

    def expand(self, kv):
        return kv.repeat(1, self.H // kv.shape[1], 1, 1)


class UpperLeftMask(StepByStep):
    """A causal triangle from the upper left, as torch's `is_causal`: query i sees keys 0 .. i
    and not the P cached ones before it. Module 16."""

    def allowed(self, q, k, mask):
        return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()


class NoMask(StepByStep):
    """No causal mask: every token sees the tokens that it should predict. Module 16."""

    def allowed(self, q, k, mask):
        return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)


class CacheExpanded(StepByStep):
    """Heads are copied before they are cached: the same logits, H / K times the bytes.
    Module 16."""

    def cache_spec(self):
        return {"k": (self.H, self.d_head), "v": (self.H, self.d_head)}

    def remember(self, k, v, cache):
        return cache.update(self.expand(k), self.expand(v))


class RopeAfterCache(StepByStep):
    """Keys are cached unturned and turned when read, all by the newest position. Module 16."""

    def forward(self, x, cos, sin, cache=None, mask=None):
        self.angles = cos, sin
        return super().forward(x, cos, sin, cache, mask)

    def norm_and_turn(self, x, norm, cos, sin):
        return norm(x) if norm is self.k_norm else super().norm_and_turn(x, norm, cos, sin)

    def attend(self, q, k, v, mask):
        cos, sin = (table.expand(k.shape[-2], -1) for table in self.angles)
        return super().attend(q, self.rotate(k, cos, sin), v, mask)


class PositionsRestart(ModernDecoder):
    """pos_offset stuck at 0: each chunk's positions begin again at 0. Module 16."""

    def place(self, ids, caches, pos_offset, attention_mask):
        positions, mask = super().place(ids, caches, pos_offset, attention_mask)
        return positions - positions[..., :1], mask


def with_mistakes(model: ModernDecoder, *mistakes: type) -> ModernDecoder:
    """A decoder on the very weights of `model` that makes all these mistakes at once.

    Raises ValueError for a class that is no mistake of this file, or an attention that has no
    such steps. Module 16."""
    in_attention = [m for m in mistakes if issubclass(m, StepByStep)]
    in_decoder = [m for m in mistakes if issubclass(m, ModernDecoder)]
    require(
        len(in_attention) + len(in_decoder) == len(mistakes),
        f"mistakes={mistakes} holds a class that is neither a StepByStep nor a ModernDecoder.",
        "Give classes of course_lib.teaching.wrong, for example RopeOnV.",
    )
    for block in model.blocks:
        require(
            isinstance(block.attn, GroupedQueryAttention),
            f"attention={type(block.attn).__name__} has no such steps.",
            "Build the model with Config(attention=GQA()).",
        )
    wrong = share(model)
    for block in wrong.blocks:
        if in_attention:
            block.attn.__class__ = type("Mistaken", tuple(in_attention), {})
    if in_decoder:
        wrong.__class__ = type("MistakenDecoder", tuple(in_decoder), {})
    return wrong
