"""Exercises of module 09: attention in MLA's latent, and the bytes of a cache."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from course_lib.model import GQA, MLA, Config, causal_mask
from course_lib.serving import KVCache
from course_lib.zoo.counts import cache_bytes, cache_values

from ..exercise import Case, Exercise, Mismatch, Mistake, named, same
from .inputs import normal

# absorbed_attention: queries brought into the latent, so that no key or value is ever made

ABSORBED_STUB = '''\
def absorbed_attention(q_nope, q_rope, latent, k_rope, U_k, U_v, cache):
    """Heads (B, H, T, w) of MLA; of each new token only its latent and rotated key are cached.

    q_nope (B, H, T, n), q_rope (B, H, T, p), already rotated; latent (B, T, r), k_rope (B, T, p);
    U_k (H, n, r), U_v (H, w, r): k_nope = U_k c and v = U_v c for each head."""
    # 1. latent, k_rope = cache.update(latent, k_rope) gives those of all S tokens so far.
    # 2. Bring the queries into the latent: q_nope @ U_k is (B, H, T, r).
    # 3. Scores: latent part plus rotated part, over sqrt(n + p); causal (causal_mask(T, S)).
    # 4. Each head's weights sum the latents, (B, H, T, r); then U_v leads out: (B, H, T, w).
    ...


absorbed_attention = check("absorbed_attention", absorbed_attention).use
'''

B, H, N, P, R, W = 2, 3, 8, 4, 5, 6  # rows, heads, unrotated, rotated, latent, value


def absorbed_attention(q_nope, q_rope, latent, k_rope, U_k, U_v, cache):
    """What the exercise asks for; the library's MultiHeadLatentAttention does the same."""
    latent, k_rope = cache.update(latent, k_rope)  # (B, S, r), (B, S, p)
    inside = q_nope @ U_k  # (B, H, T, r)
    scores = inside @ latent.unsqueeze(1).mT + q_rope @ k_rope.unsqueeze(1).mT  # (B, H, T, S)
    scores = scores / math.sqrt(q_nope.shape[-1] + q_rope.shape[-1])
    allowed = causal_mask(*scores.shape[-2:])
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return weights @ latent.unsqueeze(1) @ U_v.mT


def absorbed_case(label: str, seed: int, chunks: tuple[int, ...]) -> Case:
    T = sum(chunks)
    shapes = dict(q_nope=(B, H, T, N), q_rope=(B, H, T, P), latent=(B, T, R), k_rope=(B, T, P),
                  U_k=(H, N, R), U_v=(H, W, R))  # fmt: skip
    inputs = {n: normal(seed + i, *shape) for i, (n, shape) in enumerate(shapes.items())}
    sizes = dict(B=B, H=H, T=T, n=N, p=P, r=R, w=W)
    return Case(label, sizes, dict(inputs, chunks=chunks))


def absorbed_cases() -> list[Case]:
    return [
        absorbed_case("7 tokens at once", 40, (7,)),
        absorbed_case("chunks of 4, 1 and 5 tokens", 50, (4, 1, 5)),
        absorbed_case("9 single tokens", 60, (1,) * 9),
    ]


def run_absorbed(attempt, q_nope, q_rope, latent, k_rope, U_k, U_v, chunks) -> dict:
    cache, parts = KVCache(), []
    tokens = [x.split(chunks, dim=-2) for x in (q_nope, q_rope, latent, k_rope)]
    for pieces in zip(*tokens, strict=True):
        parts.append(named(attempt(*pieces, U_k.clone(), U_v.clone(), cache), "heads")["heads"])
    if not cache.held():
        raise Mismatch("the cache is still empty: cache.update was never called")
    held = cache.held()
    if [tuple(t.shape) for t in held] != [tuple(latent.shape), tuple(k_rope.shape)]:
        raise Mismatch(
            f"the cache holds {' and '.join(str(tuple(t.shape)) for t in held)}; expected the "
            f"latent {tuple(latent.shape)} and the rotated key {tuple(k_rope.shape)}, and no "
            "head's own"
        )
    return {"cached latent": held[0], "cached k_rope": held[1], "heads": torch.cat(parts, -2)}


def first_token_sums_itself(outputs: dict, case: Case) -> bool:
    """One key has weight 1: U_v times the first latent, whatever the scores are."""
    first = torch.einsum("hwr,br->bhw", case.inputs["U_v"], case.inputs["latent"][:, 0])
    return same(outputs["heads"][:, :, 0], first, 1e-4)


def naive_form(q_nope, q_rope, latent, k_rope, U_k, U_v, cache):
    """Right: keys and values of every head are made after all, from the same cache."""
    latent, k_rope = cache.update(latent, k_rope)
    k = torch.einsum("bsr,hnr->bhsn", latent, U_k)
    k = torch.cat((k, k_rope.unsqueeze(1).expand(-1, len(U_k), -1, -1)), -1)
    v = torch.einsum("bsr,hwr->bhsw", latent, U_v)
    q = torch.cat((q_nope, q_rope), -1)
    mask = causal_mask(q.shape[-2], k.shape[-2])
    return F.scaled_dot_product_attention(q, k, v, mask)


def one_shared_head(q_nope, q_rope, latent, k_rope, U_k, U_v, cache):
    """Right: multi-query attention over [latent, k_rope], with the true scale."""
    latent, k_rope = cache.update(latent, k_rope)
    q = torch.cat((torch.einsum("bhtn,hnr->bhtr", q_nope, U_k), q_rope), -1)
    k = torch.cat((latent, k_rope), -1).unsqueeze(1)
    scale = (q_nope.shape[-1] + q_rope.shape[-1]) ** -0.5
    mask = causal_mask(q.shape[-2], k.shape[-2])
    out = F.scaled_dot_product_attention(
        q, k, latent.unsqueeze(1), mask, scale=scale, enable_gqa=True
    )
    return torch.einsum("bhtr,hwr->bhtw", out, U_v)


def like_this(
    scale=None, nope=True, rope=True, mask=causal_mask, soften=None, absorb=None, out=None
):
    """The reference with one step another."""

    def attempt(q_nope, q_rope, latent, k_rope, U_k, U_v, cache):
        latent, k_rope = cache.update(latent, k_rope)
        n, p, r = q_nope.shape[-1], q_rope.shape[-1], latent.shape[-1]
        inside = absorb(q_nope, U_k) if absorb else q_nope @ U_k
        parts = [inside @ latent.unsqueeze(1).mT, q_rope @ k_rope.unsqueeze(1).mT]
        scores = nope * parts[0] + rope * parts[1]
        scores = scores / (scale(n, p, r) if scale else math.sqrt(n + p))
        allowed = mask(*scores.shape[-2:])
        scores = scores.masked_fill(~allowed, -torch.inf)
        weights = soften(scores) if soften else scores.softmax(-1)
        heads = weights @ latent.unsqueeze(1)
        return out(heads, U_v) if out else heads @ U_v.mT

    return attempt


def upper_left(T: int, S: int) -> Tensor:
    return torch.ones(T, S, dtype=torch.bool).tril()


def everything(T: int, S: int) -> Tensor:
    return torch.ones(T, S, dtype=torch.bool)


def strictly_before(T: int, S: int) -> Tensor:
    return causal_mask(T, S) & ~torch.eye(T, S, dtype=torch.bool).roll(S - T, 1) | (
        torch.arange(S) == 0
    )


def across_heads(scores: Tensor) -> Tensor:
    """One distribution over the keys of all heads together."""
    flat = scores.transpose(1, 2).flatten(2)  # (B, T, H S)
    return flat.softmax(-1).unflatten(-1, (scores.shape[1], -1)).transpose(1, 2)


def summed_over_heads(scores: Tensor) -> Tensor:
    return scores.sum(1, keepdim=True).softmax(-1).expand_as(scores)


def over_queries(scores: Tensor) -> Tensor:
    return scores.softmax(-2).nan_to_num(0)


def two_softmaxes(q_nope, q_rope, latent, k_rope, U_k, U_v, cache):
    latent, k_rope = cache.update(latent, k_rope)
    allowed, weights = causal_mask(q_nope.shape[-2], latent.shape[-2]), 0
    for scores in (q_nope @ U_k @ latent.unsqueeze(1).mT, q_rope @ k_rope.unsqueeze(1).mT):
        scores = scores / math.sqrt(q_nope.shape[-1] + q_rope.shape[-1])
        weights = weights + scores.masked_fill(~allowed, -torch.inf).softmax(-1) / 2
    return weights @ latent.unsqueeze(1) @ U_v.mT


def only_new_tokens(q_nope, q_rope, latent, k_rope, U_k, U_v, cache):
    cache.update(latent, k_rope)
    return absorbed_attention(q_nope, q_rope, latent, k_rope, U_k, U_v, KVCache())


def turned_around(q_nope, q_rope, latent, k_rope, U_k, U_v, cache):
    heads = absorbed_attention(q_nope, q_rope, latent, k_rope, U_k, U_v, cache)
    return heads.roll(1, dims=1)


def expanded_cache(q_nope, q_rope, latent, k_rope, U_k, U_v, cache):
    k, v = (torch.einsum("bsr,hnr->bhsn", latent, U) for U in (U_k, U_v))
    turned = k_rope.unsqueeze(1).expand(-1, len(U_k), -1, -1)
    k, v = cache.update(torch.cat((k, turned), -1), v)
    q = torch.cat((q_nope, q_rope), -1)
    return F.scaled_dot_product_attention(q, k, v, causal_mask(q.shape[-2], k.shape[-2]))


ABSORBED_MISTAKES = (
    Mistake("scale of the latent", "the scale is 1 / sqrt(r + p), the width of the absorbed dot "
            "product: the scores are those of the heads, so n + p counts",
            like_this(scale=lambda n, p, r: math.sqrt(r + p))),
    Mistake("scale without the rotated part", "the scale is 1 / sqrt(n): a key has n + p channels",
            like_this(scale=lambda n, p, r: math.sqrt(n))),
    Mistake("no scale", "the scores are not divided by sqrt(n + p)",
            like_this(scale=lambda n, p, r: 1.0)),
    Mistake("rotated part forgotten", "q_rope and k_rope are not in the scores: attention knows "
            "no positions", like_this(rope=False)),
    Mistake("only the rotated part", "only the rotated parts are compared: q_nope U_k and the "
            "latent belong into the scores too", like_this(nope=False)),
    Mistake("mask from the upper left", "the mask starts at the upper left, so new queries do not "
            "see the cached tokens before them: query i sees keys 0 to P + i",
            like_this(mask=upper_left)),
    Mistake("no mask", "tokens see the tokens after them: the mask is missing",
            like_this(mask=everything)),
    Mistake("own key hidden", "a query does not see its own token: the diagonal is allowed",
            like_this(mask=strictly_before)),
    Mistake("one softmax across the heads", "the weights of all heads together sum to 1: each "
            "head has its own softmax, only the latent is shared", like_this(soften=across_heads)),
    Mistake("scores summed over heads", "scores were added up over the heads before the softmax: "
            "each head keeps its own", like_this(soften=summed_over_heads)),
    Mistake("softmax over queries", "the softmax runs over the queries: weights sum to 1 over the "
            "keys, the last axis", like_this(soften=over_queries)),
    Mistake("two softmaxes", "latent part and rotated part have a softmax each: add the scores "
            "first, then one softmax", two_softmaxes),
    Mistake("one U_k for all heads", "every head uses the U_k of head 0: each has its own, only "
            "the latent is shared", like_this(absorb=lambda q, U_k: q @ U_k[0])),
    Mistake("one U_v for all heads", "every head uses the U_v of head 0: each leads out of the "
            "latent by its own", like_this(out=lambda heads, U_v: heads @ U_v[0].mT)),
    Mistake("only new tokens", "attention reads the new tokens alone: use what cache.update "
            "returns", only_new_tokens),
    Mistake("heads in another order", "head h stands at the place of head h + 1: the order of the "
            "heads must be that of U_v", turned_around),
    Mistake("expanded heads cached", "the cache holds (2, 3, 7, 12) and (2, 3, 7, 6); expected "
            "the latent (2, 7, 5) and the rotated key (2, 7, 4), and no head's own",
            expanded_cache),
)  # fmt: skip

ABSORBED_ATTENTION = Exercise(
    name="absorbed_attention",
    module="09",
    prompt="Attend in the latent: no key and no value of a head is ever made.",
    signature=("q_nope", "q_rope", "latent", "k_rope", "U_k", "U_v", "cache"),
    reference=absorbed_attention,
    stub=ABSORBED_STUB,
    make_cases=absorbed_cases,
    run=run_absorbed,
    axes={"heads": "B H T w", "cached latent": "B T r", "cached k_rope": "B T p"},
    properties={"the first token's heads are U_v times its own latent": first_token_sums_itself},
    equivalents={"naive": naive_form, "one shared head": one_shared_head},
    mistakes=ABSORBED_MISTAKES,
)

# cache_size: the product of six numbers, or with MLA of five

SIZE_STUB = '''\
def cache_size(cfg, tokens, batch, dtype):
    """Bytes of the key/value cache of ModernDecoder(cfg) for `batch` rows of `tokens` tokens."""
    # 1. cfg.attention is a GQA or an MLA: isinstance(cfg.attention, MLA) tells.
    # 2. GQA: a token leaves cfg.n_kv_heads keys and as many values, cfg.d_head wide, in each layer.
    # 3. MLA: one latent and one rotated key (kv_lora_rank, d_rope), for all heads together.
    # 4. GQA(window=...) keeps at most `window` tokens; dtype.itemsize is the bytes of a value.
    ...


cache_size = check("cache_size", cache_size).use
'''


def size_cases() -> list[Case]:
    odd = dict(d_model=96, n_layers=5, n_heads=12, n_kv_heads=4, d_head=24, n_experts=0,
               first_k_dense=0)  # fmt: skip
    latent = MLA(kv_lora_rank=40, d_rope=8, d_nope=24, d_value=20)
    made = {
        "grouped heads in bfloat16": (Config(**odd), 77, 3, torch.bfloat16),
        "MLA in float32": (Config(attention=latent, **odd), 77, 3, torch.float32),
        "a window of 50 and 77 tokens": (Config(attention=GQA(window=50), **odd), 77, 3,
                                         torch.bfloat16),
        "a window of 50 and 30 tokens": (Config(attention=GQA(window=50), **odd), 30, 2,
                                         torch.float32),
    }  # fmt: skip
    names = ("cfg", "tokens", "batch", "dtype")
    return [Case(label, {}, dict(zip(names, v, strict=True))) for label, v in made.items()]


def run_size(attempt, cfg, tokens, batch, dtype) -> dict:
    size = attempt(cfg, tokens, batch, dtype)
    if isinstance(size, bool) or not isinstance(size, int | float):
        raise Mismatch(f"it returns a {type(size).__name__}; expected a number of bytes")
    return {"bytes": float(size)}


def measured(cfg, tokens, batch, dtype):
    """Right: counted on tensors of those shapes, without memory."""
    window = getattr(cfg.attention, "window", None) or tokens
    if isinstance(cfg.attention, MLA):
        shapes = [(cfg.attention.kv_lora_rank,), (cfg.attention.d_rope,)]
    else:
        shapes = [(cfg.n_kv_heads, cfg.d_head)] * 2
    made = [torch.empty(batch, min(tokens, window), *s, dtype=dtype, device="meta") for s in shapes]
    return cfg.n_layers * sum(t.numel() * t.element_size() for t in made)


def by_hand(cfg, tokens, batch, dtype):
    """Right: the two products written out."""
    part = cfg.attention
    if isinstance(part, MLA):
        a_token = part.kv_lora_rank + part.d_rope
    else:
        a_token = 2 * cfg.n_kv_heads * cfg.d_head
        tokens = tokens if part.window is None else min(part.window, tokens)
    return a_token * batch * tokens * cfg.n_layers * dtype.itemsize


def count(gqa=None, mla=None, kept=None, final=None):
    """The reference with one factor another."""

    def attempt(cfg, tokens, batch, dtype):
        part = cfg.attention
        own = mla if isinstance(part, MLA) else gqa
        values = own(cfg) if own else cache_values(cfg)
        window = getattr(part, "window", None)
        usual = tokens if window is None else min(tokens, window)
        n = kept(tokens, window) if kept else usual
        if final:
            return final(values * n, cfg, batch, dtype)
        return batch * n * cfg.n_layers * values * dtype.itemsize

    return attempt


def heads_of_mla(cfg) -> int:
    return 2 * cfg.n_heads * cfg.d_head


SIZE_MISTAKES = (
    Mistake("query heads", "it counts the query heads: only the n_kv_heads key/value heads are "
            "cached", count(gqa=heads_of_mla)),
    Mistake("keys only", "the 2 is missing: a key and a value are cached for each head",
            count(gqa=lambda cfg: cfg.n_kv_heads * cfg.d_head)),
    Mistake("width from d_model", "it takes d_model // n_heads for the width of a head: cfg.d_head "
            "says it, and it is often another",
            count(gqa=lambda cfg: 2 * cfg.n_kv_heads * (cfg.d_model // cfg.n_heads))),
    Mistake("MLA as heads", "with MLA it counts keys and values of every head: the cache holds one "
            "latent and one rotated key for all of them", count(mla=heads_of_mla),
            count(mla=lambda cfg: 2 * cfg.n_kv_heads * cfg.d_head),
            count(mla=lambda cfg: 2 * cfg.n_heads * cfg.attention.d_nope)),
    Mistake("MLA without the rotated key", "with MLA the rotated key is missing: it cannot be made "
            "from the latent and is cached beside it",
            count(mla=lambda cfg: cfg.attention.kv_lora_rank)),
    Mistake("MLA twice", "with MLA the latent is counted twice: keys and values come from the same "
            "one", count(mla=lambda cfg: 2 * (cfg.attention.kv_lora_rank + cfg.attention.d_rope)),
            count(mla=lambda cfg: 2 * cfg.attention.kv_lora_rank + cfg.attention.d_rope)),
    Mistake("MLA with a rotated key for each head", "with MLA it counts a rotated key for each "
            "head: all heads share one",
            count(mla=lambda cfg: cfg.attention.kv_lora_rank + cfg.n_heads * cfg.attention.d_rope)),
    Mistake("window ignored", "a windowed layer forgets: it keeps at most `window` tokens",
            count(kept=lambda tokens, window: tokens)),
    Mistake("window always full", "with fewer tokens than the window, only those are kept: take "
            "the smaller of the two", count(kept=lambda tokens, window: window or tokens)),
    Mistake("window not counting the token itself", "the window counts the token itself, so "
            "`window` tokens are kept and not window - 1",
            count(kept=lambda tokens, window: min(tokens, window - 1) if window else tokens)),
    Mistake("one layer", "it counts one layer: each of the n_layers has a cache of its own",
            count(final=lambda n, cfg, batch, dtype: batch * n * dtype.itemsize)),
    Mistake("one row", "it counts one row: each of the `batch` rows has a cache of its own",
            count(final=lambda n, cfg, batch, dtype: n * cfg.n_layers * dtype.itemsize)),
    Mistake("values, not bytes", "it counts values: multiply by dtype.itemsize for bytes",
            count(final=lambda n, cfg, batch, dtype: batch * n * cfg.n_layers)),
    Mistake("bits", "it counts bits: dtype.itemsize is already in bytes",
            count(final=lambda n, cfg, batch, dtype:
                  8 * batch * n * cfg.n_layers * dtype.itemsize)),
    Mistake("always two bytes", "it takes 2 bytes for every value: dtype.itemsize is 4 for float32",
            count(final=lambda n, cfg, batch, dtype: 2 * batch * n * cfg.n_layers)),
    Mistake("in GiB", "it returns GiB: the answer is in bytes",
            count(final=lambda n, cfg, batch, dtype:
                  batch * n * cfg.n_layers * dtype.itemsize / 2**30)),
)  # fmt: skip


def whole_number(outputs: dict, case: Case) -> bool:
    return outputs["bytes"] == round(outputs["bytes"]) > 0


CACHE_SIZE = Exercise(
    name="cache_size",
    module="09",
    prompt="Size the cache of a decoder from its Config.",
    signature=("cfg", "tokens", "batch", "dtype"),
    reference=cache_bytes,
    stub=SIZE_STUB,
    make_cases=size_cases,
    run=run_size,
    axes={},
    properties={"a whole number of bytes, above 0": whole_number},
    equivalents={"on meta tensors": measured, "by hand": by_hand},
    mistakes=SIZE_MISTAKES,
)
