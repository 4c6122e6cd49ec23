"""Exercises on attention: grouped-query attention with a cache, from projections to W_o."""

import torch
import torch.nn.functional as F
from torch import Tensor

from course_lib.model import (
    Config,
    GroupedQueryAttention,
    RotaryTable,
    causal_mask,
    document_mask,
    merge_heads,
    split_heads,
)
from course_lib.serving import KVCache

from ..exercise import Case, Exercise, Mismatch, Mistake, build, named, same
from ..wrong import (
    CacheExpanded,
    NoMask,
    NormAfterRope,
    RopeAfterCache,
    RopeOnV,
    StepByStep,
    TiledHeads,
    UpperLeftMask,
)
from .inputs import normal, weights_of

# grouped_query_attention: the forward pass of GroupedQueryAttention

STUB = '''\
class MyAttention(GroupedQueryAttention):
    def forward(self, x, cos, sin, cache=None, mask=None):
        """x (B, T, D) to (B, T, D); mask is True where a query may see a key, or None: causal."""
        # 1. self.W_q, self.W_k, self.W_v, each split_heads: q (B, H, T, h), k and v (B, K, T, h).
        # 2. self.q_norm and self.k_norm on each head, then apply_rope on q and k.
        # 3. With a cache: k, v = cache.update(k, v) gives all S keys and values so far.
        # 4. Each of the K heads in place self.group_size times; softmax(q k^T / sqrt(h)) v.
        # 5. merge_heads, self.W_o.
        ...


MyAttention = check("grouped_query_attention", MyAttention).use
'''


def attention_cases() -> list[Case]:
    cfg = Config(d_model=24, n_heads=6, n_kv_heads=2, d_head=8)
    state = weights_of(GroupedQueryAttention(cfg), seed=11)
    weights = dict(cfg=cfg, state=state)
    sizes = dict(B=3, D=24, H=6, K=2, h=8, Hh=48)
    documents = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])
    return [
        Case(
            "7 tokens at once",
            dict(sizes, T=7),
            dict(weights, x=normal(12, 3, 7, 24), positions=torch.tensor([2, 3, 5, 8, 9, 12, 14])),
        ),
        Case(
            "a cache and chunks of 3, 1 and 1 tokens",
            dict(sizes, T=5, S=5),
            dict(weights, x=normal(13, 3, 5, 24), positions=torch.arange(4, 9), chunks=(3, 1, 1)),
        ),
        Case(
            "a cache and chunks of 2, 4 and 3 tokens",
            dict(sizes, T=9, S=9),
            dict(weights, x=normal(14, 3, 9, 24), positions=torch.arange(9), chunks=(2, 4, 3)),
        ),
        Case(
            "a mask that keeps documents apart",
            dict(sizes, T=5),
            dict(weights, x=normal(15, 3, 5, 24), positions=torch.arange(5),
                 mask=document_mask(documents)),
        ),
    ]  # fmt: skip


def run_attention(attempt, cfg, state, x: Tensor, positions: Tensor, chunks=None, mask=None):
    attn = build(attempt, state, cfg, 0)
    cos, sin = RotaryTable(cfg)(positions)
    with torch.no_grad():
        whole = named(attn(x, cos, sin, None, mask), "out")["out"]
        if chunks is None:
            other = torch.cat((x[:, :-1], x[:, -1:] + 1), dim=1)
            changed = named(attn(other, cos, sin, None, mask), "out")["out"]
            return {"out": whole, "out when the last token is another one": changed}
        cache, parts = KVCache(), []
        tables = (table.split(chunks, dim=0) for table in (cos, sin))
        for part, c, s in zip(x.split(chunks, dim=1), *tables, strict=True):
            parts.append(named(attn(part, c, s, cache, None), "out")["out"])
    if not cache.held():
        raise Mismatch("the cache is still empty: cache.update was never called")
    k, v = cache.held()
    out = torch.cat(parts, dim=1)
    return {"cached k": k, "cached v": v, "out": out, "out without a cache": whole}


def causal(outputs: dict, case: Case) -> bool:
    other = outputs.get("out when the last token is another one")
    return other is None or same(other[:, :-1], outputs["out"][:, :-1], 1e-4)


def cache_changes_nothing(outputs: dict, case: Case) -> bool:
    whole = outputs.get("out without a cache")
    return whole is None or same(outputs["out"], whole, 1e-4)


class Explicit(StepByStep):
    """Right: scores, mask and weights in plain torch; a mistake overrides one step."""

    def allowed(self, q, k, mask):
        return self.default_mask(q.shape[-2], k.shape[-2]) if mask is None else mask

    def default_mask(self, T: int, S: int) -> Tensor:
        return causal_mask(T, S)

    def attend(self, q, k, v, mask):
        scores = q @ self.expand(k).mT / self.divisor()
        return self.weigh(scores, self.allowed(q, k, mask)) @ self.expand(v)

    def divisor(self) -> float:
        return self.d_head**0.5

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return scores.masked_fill(~allowed, -torch.inf).softmax(-1)


class FusedKernel(StepByStep):
    """Right: torch's fused kernel, which shares heads out by itself, with a lower-right mask."""

    def attend(self, q, k, v, mask):
        mask = causal_mask(q.shape[-2], k.shape[-2]) if mask is None else mask
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


class GroupedScores(Explicit):
    """Right: nothing is copied, q stands as (B, K, group, T, h) over its key head."""

    def attend(self, q, k, v, mask):
        q = q.unflatten(1, (self.H_kv, -1))
        scores = q @ k.unsqueeze(2).mT / self.divisor()
        allowed = self.allowed(q, k, mask)
        allowed = allowed if mask is None else allowed.unsqueeze(1)
        return (self.weigh(scores, allowed) @ v.unsqueeze(2)).flatten(1, 2)


class Tiled(Explicit):
    def expand(self, kv):
        return torch.cat([kv] * (self.H // kv.shape[1]), dim=1)


class FirstHeadOnly(Explicit):
    def expand(self, kv):
        return kv[:, :1].expand(-1, self.H, -1, -1)


class QueryUnrotated(Explicit):
    def norm_and_turn(self, x, norm, cos, sin):
        return norm(x) if norm is self.q_norm else super().norm_and_turn(x, norm, cos, sin)


class KeyUnrotated(Explicit):
    def norm_and_turn(self, x, norm, cos, sin):
        return norm(x) if norm is self.k_norm else super().norm_and_turn(x, norm, cos, sin)


class NoRope(Explicit):
    def norm_and_turn(self, x, norm, cos, sin):
        return norm(x)


class NoNorm(Explicit):
    def norm_and_turn(self, x, norm, cos, sin):
        return self.rotate(x, cos, sin)


class NormOfValues(Explicit):
    def turn_value(self, v, cos, sin):
        return self.k_norm(v)


class UpperLeft(Explicit):
    def default_mask(self, T, S):
        return torch.ones(T, S, dtype=torch.bool).tril()


class TorchIsCausal(StepByStep):
    def attend(self, q, k, v, mask):
        causal = mask is None
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)


class SeesFuture(Explicit):
    def default_mask(self, T, S):
        return torch.ones(T, S, dtype=torch.bool)


class OnlyChunkOfOneUnmasked(Explicit):
    """Causal without a cache, but everything visible as soon as there are cached tokens."""

    def default_mask(self, T, S):
        return super().default_mask(T, S) if T == S else torch.ones(T, S, dtype=torch.bool)


class OwnTokenHidden(Explicit):
    def default_mask(self, T, S):
        return causal_mask(T, S).tril(S - T - 1)


class MaskInverted(Explicit):
    def weigh(self, scores, allowed):
        return scores.masked_fill(allowed, -torch.inf).softmax(-1)


class MaskIgnored(Explicit):
    def allowed(self, q, k, mask):
        return causal_mask(q.shape[-2], k.shape[-2])


class MaskAfterSoftmax(Explicit):
    def weigh(self, scores, allowed):
        return scores.softmax(-1).masked_fill(~allowed, 0)


class ZeroInsteadOfInfinity(Explicit):
    def weigh(self, scores, allowed):
        return scores.masked_fill(~allowed, 0).softmax(-1)


class SoftmaxOverHeads(Explicit):
    def weigh(self, scores, allowed):
        return scores.masked_fill(~allowed, -torch.inf).softmax(1).nan_to_num()


class SoftmaxOverHeadsNaN(Explicit):
    def weigh(self, scores, allowed):
        return scores.masked_fill(~allowed, -torch.inf).softmax(1)


class SoftmaxOverQueries(Explicit):
    def weigh(self, scores, allowed):
        return scores.masked_fill(~allowed, -torch.inf).softmax(-2)


class ScaleOfModel(Explicit):
    def divisor(self):
        return self.W_q.in_features**0.5


class ScaleOfAllHeads(Explicit):
    def divisor(self):
        return (self.H * self.d_head) ** 0.5


class NoScale(Explicit):
    def divisor(self):
        return 1.0


class NoRoot(Explicit):
    def divisor(self):
        return float(self.d_head)


class SplitByReshape(Explicit):
    """view(B, heads, T, h) in place of view(B, T, heads, h).transpose(1, 2)."""

    def norm_and_turn(self, x, norm, cos, sin):
        return super().norm_and_turn(merge_heads(x).reshape(x.shape), norm, cos, sin)

    def turn_value(self, v, cos, sin):
        return merge_heads(v).reshape(v.shape)


class MergeByReshape(Explicit):
    """(B, H, T, h) read as (B, T, H h) without the transpose."""

    def attend(self, q, k, v, mask):
        heads = super().attend(q, k, v, mask)
        return split_heads(heads.reshape(*merge_heads(heads).shape), self.H)


class HeadsInterleaved(Explicit):
    """The channels of the heads alternate: (B, T, h, H) flattened."""

    def attend(self, q, k, v, mask):
        heads = super().attend(q, k, v, mask)
        return split_heads(heads.permute(0, 2, 3, 1).flatten(2), self.H)


class NoOutputProjection(Explicit):
    def forward(self, x, cos, sin, cache=None, mask=None):
        super().forward(x, cos, sin, cache, mask)
        return self.concat

    def attend(self, q, k, v, mask):
        heads = super().attend(q, k, v, mask)
        self.concat = merge_heads(heads)
        return heads


class OnlyNewTokens(Explicit):
    def remember(self, k, v, cache):
        cache.update(k, v)
        return k, v


class CacheUnused(Explicit):
    def remember(self, k, v, cache):
        return k, v


class CachedUnrotated(Explicit):
    """The keys are right in this call, but what is cached was not turned."""

    def forward(self, x, cos, sin, cache=None, mask=None):
        self.angles = cos, sin
        return super().forward(x, cos, sin, cache, mask)

    def remember(self, k, v, cache):
        cos, sin = self.angles
        before = self.rotate(k, cos, -sin)
        old_and_new, v = cache.update(before, v)
        return torch.cat((old_and_new[:, :, : -k.shape[2]], k), dim=2), v


ATTENTION_MISTAKES = (
    Mistake("tiled heads", "the key/value heads were tiled (0 1 0 1 0 1): query heads of a group "
            "are neighbours, so each is repeated in place (0 0 0 1 1 1)", Tiled, TiledHeads),
    Mistake("first head only", "all query heads read key/value head 0: query head h reads head "
            "h // group_size", FirstHeadOnly),
    Mistake("expanded heads cached", "the results are right, but the cache holds the H copied "
            "heads: cache the K heads before they are repeated, or its bytes grow by H / K",
            CacheExpanded),
    Mistake("RoPE on v", "the values were rotated too: RoPE belongs on q and k, whose dot product "
            "then tells the distance; v is what is passed on", RopeOnV),
    Mistake("norm after RoPE", "QK-Norm came after RoPE: its gains then meet rotated pairs; "
            "normalise first, then rotate", NormAfterRope),
    Mistake("q not rotated", "q was not rotated: the score then tells the key's position, not "
            "the distance to it", QueryUnrotated),
    Mistake("k not rotated", "k was not rotated: the score then tells the query's position, not "
            "the distance between the two", KeyUnrotated),
    Mistake("no RoPE", "neither q nor k was rotated: apply_rope with cos and sin is missing, so "
            "the order of earlier tokens is not seen", NoRope),
    Mistake("no QK-Norm", "q_norm and k_norm are missing: each query and key head is normalised "
            "before it is rotated", NoNorm),
    Mistake("norm of v", "the values were normalised too: QK-Norm is for q and k only",
            NormOfValues),
    Mistake("upper-left mask", "the causal mask is aligned to the upper left, as torch's "
            "is_causal: with P cached tokens query i sees keys up to P + i, causal_mask(T, S)",
            UpperLeft, UpperLeftMask, TorchIsCausal),
    Mistake("no mask", "there is no causal mask: every token sees the tokens that it should "
            "predict", SeesFuture, NoMask),
    Mistake("chunk without a mask", "after cached tokens nothing is masked: the tokens of one "
            "chunk must not see each other's future, causal_mask(T, S)", OnlyChunkOfOneUnmasked),
    Mistake("own token hidden", "the diagonal is masked too: a token sees itself, only keys "
            "after it are hidden", OwnTokenHidden),
    Mistake("mask inverted", "the mask was used the wrong way round: True means may attend, so "
            "fill where it is False (~mask)", MaskInverted),
    Mistake("mask ignored", "the argument mask was not used: when it is given, it takes the place "
            "of the causal mask", MaskIgnored),
    Mistake("mask after softmax", "the mask came after the softmax: the weights no longer sum "
            "to 1; put -inf into the scores before it", MaskAfterSoftmax),
    Mistake("zero instead of -inf", "hidden scores were set to 0, which is a score like any "
            "other: only -inf gives weight 0", ZeroInsteadOfInfinity),
    Mistake("softmax over heads", "softmax ran over the heads (dim 1): it runs over the keys, the "
            "last axis, so that the weights of a query sum to 1", SoftmaxOverHeads,
            SoftmaxOverHeadsNaN),
    Mistake("softmax over queries", "softmax ran over the queries (dim -2): it runs over the "
            "keys, the last axis", SoftmaxOverQueries),
    Mistake("scaled by d_model", "the scores were divided by sqrt(d_model): the dot product runs "
            "over the d_head channels of one head, so sqrt(d_head)", ScaleOfModel),
    Mistake("scaled by all heads", "the scores were divided by sqrt(H d_head): each head has its "
            "own dot product of d_head channels, so sqrt(d_head)", ScaleOfAllHeads),
    Mistake("no scale", "the scores were not divided by sqrt(d_head): they grow with the width "
            "and the softmax picks one key", NoScale),
    Mistake("no root", "the scores were divided by d_head, not by its square root", NoRoot),
    Mistake("split by reshape", "the heads were cut by view(B, heads, T, h), which mixes tokens: "
            "view(B, T, heads, h), then transpose(1, 2)", SplitByReshape),
    Mistake("merge by reshape", "the heads were joined without transpose(1, 2): (B, H, T, h) read "
            "as (B, T, H h) mixes tokens", MergeByReshape),
    Mistake("heads interleaved", "the channels of the heads alternate in the concatenation: W_o "
            "expects head after head, (B, T, H, h) flattened", HeadsInterleaved),
    Mistake("no W_o", "the result is still the concatenated heads: W_o, back to the width of the "
            "stream, is missing", NoOutputProjection),
    Mistake("only the new tokens", "what cache.update returns was not used: the new queries saw "
            "only the new keys", OnlyNewTokens),
    Mistake("cache unused", "cache.update was never called: the next call knows nothing of these "
            "tokens", CacheUnused),
    Mistake("RoPE after the cache", "unrotated keys were cached and all rotated by the newest "
            "position: each key keeps the angle of its own, so rotate before cache.update",
            RopeAfterCache),
    Mistake("unrotated keys cached", "the keys were cached before they were rotated: later calls "
            "read them without a position", CachedUnrotated),
)  # fmt: skip

GROUPED_QUERY_ATTENTION = Exercise(
    name="grouped_query_attention",
    module="16",
    prompt="Attend with H query heads that share K cached key/value heads.",
    signature=("x", "cos", "sin", "cache", "mask"),
    reference=GroupedQueryAttention,
    stub=STUB,
    make_cases=attention_cases,
    run=run_attention,
    axes={
        "out": "B T D",
        "out without a cache": "B T D",
        "out when the last token is another one": "B T D",
        "cached k": "B K S h",
        "cached v": "B K S h",
    },
    properties={
        "a token does not depend on later ones": causal,
        "with a cache each token gets what it gets without one": cache_changes_nothing,
    },
    equivalents={
        "step by step": StepByStep,
        "plain torch": Explicit,
        "fused kernel": FusedKernel,
        "grouped scores": GroupedScores,
    },
    mistakes=ATTENTION_MISTAKES,
)
