# %% [markdown] id="title" slideshow={"slide_type": "slide"}
# # 09 · KV heads: MHA, MQA, GQA, MLA
#
# *While a model writes, it drags along a memory of everything it has read. This notebook builds the four ways
# to make that memory small, measures every byte of it, and shows what each way costs.*
#
# | | |
# |---|---|
# | **You need** | attention and masks (module 08), RoPE (module 05), a little PyTorch |
# | **You will learn** | to build multi-head, grouped-query and latent attention from plain torch; to size the cache of a published model from its configuration; to derive MLA's two absorptions and see what RoPE does to them; to tell bytes from arithmetic intensity; to judge what is claimed about quality |
# | **Time** | 80 minutes to read and run, 30 for the exercises |

# %% [markdown] id="title-notes" slideshow={"slide_type": "notes"}
# **2 minutes.** One question to carry through: *what does a token leave behind?* All four names of the title are answers
# to it. Weights are not the topic: every variant here changes them only a little.

# %% id="setup" slideshow={"slide_type": "skip"}
import math
from dataclasses import replace

import torch
import torch.nn.functional as F

torch.set_num_threads(1)

from course_lib import (
    GQA,
    MLA,
    Config,
    GroupedQueryAttention,
    KVCache,
    ModernDecoder,
    MultiHeadLatentAttention,
    apply_rope,
    causal_mask,
    new_caches,
    next_token_loss,
)
from course_lib.model import RotaryTable, merge_heads, split_heads

# %% id="setup-more" slideshow={"slide_type": "skip"}
from course_lib.teaching import check, diagrams, theme
from course_lib.teaching.explorables import EXPLORABLES
from course_lib.teaching.lessons import heads as lesson
from course_lib.teaching.lessons import heads_figures as figures
from course_lib.teaching.wrong import CacheExpanded, TiledHeads, with_mistakes
from course_lib.trace import trace
from course_lib.zoo.configs import cached_layers, kv, published, published_cache_bytes
from course_lib.zoo.counts import cache_bytes, cache_values, count_parameters, meta_attention

# %% [markdown] id="first-figure-text" slideshow={"slide_type": "slide"}
# ## What one token leaves in one layer, to scale
#
# One layer with `128` heads of width `128`, in four designs. The area of a square is the count of numbers that must be kept, for **every token** that was read.

# %% id="first-figure"
H, h = 128, 128
left_behind = {"MHA": kv(128, h), "GQA": kv(8, h), "MQA": kv(1, h), "MLA": 512 + 64}
notes = {"MHA": f"2 x {H} x {h}", "GQA": f"2 x 8 x {h}", "MQA": f"2 x 1 x {h}", "MLA": "512 + 64"}
fig, ax = theme.figure(10, 4.2)
figures.draw_areas(left_behind, notes, ax)
theme.save(fig, "09_one_token")
theme.show(
    fig,
    alt="Four squares by area: multi-head attention leaves a large one, grouped-query attention a "
    "sixteenth of it, latent attention about a quarter of that, multi-query attention the least.",
    summary=", ".join(f"{name} {n:,} values" for name, n in left_behind.items()),
)

# %% [markdown] id="first-figure-notes" slideshow={"slide_type": "notes"}
# **3 minutes.** Ask which of the four the room would build. Then say what the picture hides: MLA's small square serves
# `128` *different* heads, while MQA's serves `128` heads that all read the same.

# %% [markdown] id="first-figure-after" slideshow={"slide_type": "skip"}
# The same is left in every layer, until the text is finished. (The widths are those of DeepSeek-V3.)
#
# Why must anything be kept? To predict the next token, the query of the last one meets the keys of **all** tokens so far, and the resulting weights sum their values. Old
# keys and values never change, so they are computed once and kept: the *key/value cache*. Old queries are never needed
# again. Projecting a new token costs the same at every step; attending to all
# tokens before it costs more with each of them.
#
# Two things follow. The cache is memory that grows with every token of every request. And each step must *read* all of
# it. The first decides how many requests fit on a device, the second how fast they can go.

# %% [markdown] id="build-text" slideshow={"slide_type": "skip"}
# ## 1 · Build it: every head its own keys
#
# Multi-head attention, from the weights of a library layer. Axis letters: $B$ rows, $T$ new tokens, $S$ tokens seen, $D$ stream, $H$
# query heads, $K$ key/value heads, $h$ width of a head. Here $K = H$.

# %% id="build" slideshow={"slide_type": "skip"}
torch.manual_seed(0)
sizes = dict(vocab_size=100, d_model=64, n_layers=2, n_heads=8, d_head=16, n_experts=0,
             first_k_dense=0, attention=GQA(qk_norm=False))  # fmt: skip
cfg = Config(n_kv_heads=8, **sizes)
layer = GroupedQueryAttention(cfg)
x = torch.randn(2, 5, 64)  # (B, T, D)
cos, sin = RotaryTable(cfg)(torch.arange(5))

q, k, v = (split_heads(x @ W.weight.T, 8) for W in (layer.W_q, layer.W_k, layer.W_v))
q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
scores = q @ k.mT / math.sqrt(16)  # (B, H, T, S)
weights = scores.masked_fill(~causal_mask(5), -torch.inf).softmax(-1)
out = (weights @ v).transpose(1, 2).flatten(2) @ layer.W_o.weight.T
print("q", tuple(q.shape), "k", tuple(k.shape), "scores", tuple(scores.shape))
print("heads side by side", tuple((weights @ v).transpose(1, 2).flatten(2).shape))
print("equal to the library's layer:", torch.allclose(out, layer(x, cos, sin), atol=1e-5))

# %% [markdown] id="share-text" slideshow={"slide_type": "slide"}
# ## 2 · Share: a dial from many to one
#
# Let $g = H / K$ neighbouring query heads read the same key/value head (arXiv 2305.13245). $K = H$ is multi-head attention (MHA), $K = 1$ is
# multi-query attention (MQA, arXiv 1911.02150), everything between is grouped-query attention (GQA). Nothing needs copying: the queries
# get one more axis.


# %% id="share"
def grouped_attention(q, k, v):
    """q (B, H, T, h), k and v (B, K, S, h) to (B, H, T, h); query head i reads i // g."""
    T, K, S = q.shape[2], k.shape[1], k.shape[2]
    by_group = q.unflatten(1, (K, -1))  # (B, K, g, T, h)
    scores = torch.einsum("bkgth,bksh->bkgts", by_group, k) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~causal_mask(T, S), -torch.inf).softmax(-1)
    return torch.einsum("bkgts,bksh->bkgth", weights, v).flatten(1, 2)


# %% id="share-equal" tags=["output-only"]
for K in (8, 4, 2, 1):
    layer = GroupedQueryAttention(Config(n_kv_heads=K, **sizes))
    q = apply_rope(split_heads(layer.W_q(x), 8), cos, sin)
    k = apply_rope(split_heads(layer.W_k(x), K), cos, sin)
    v = split_heads(layer.W_v(x), K)
    out = layer.W_o(merge_heads(grouped_attention(q, k, v)))
    weights = sum(p.numel() for p in layer.parameters())
    print(f"K = {K}: k and v {tuple(k.shape)}, {weights:>6,} weights, as the library: "
          f"{torch.allclose(out, layer(x, cos, sin), atol=1e-5)}")  # fmt: skip

# %% [markdown] id="share-notes" slideshow={"slide_type": "notes"}
# **4 minutes.** The number of queries never changes, so each head still asks its own question. Only what can be
# *found* is shared. Point at the shapes: the axis K in the cache is the whole saving.

# %% [markdown] id="share-explore-text" slideshow={"slide_type": "slide"}
# ### Turn the dial
#
# Move $K$ from 32 to 1. Then switch the order to *tiled* and see which heads now read the wrong keys.

# %% id="share-explore"
EXPLORABLES["kv_sharing"]()

# %% [markdown] id="share-explore-notes" slideshow={"slide_type": "notes"}
# **4 minutes.** Move K above H: the explorable refuses and says which numbers divide H. With K = 1 or
# K = H the tiled order is right by accident; that is why tests on MHA models never find this fault.

# %% [markdown] id="copies-text" slideshow={"slide_type": "skip"}
# ### Copies and views
#
# Many implementations bring $k$ and $v$ to $H$ heads first and then call ordinary attention. How much memory does that take? It
# depends on the function.

# %% id="copies" slideshow={"slide_type": "skip"}
k = torch.randn(1, 2, 100, 16)
forms = {
    "k itself, 2 heads": k,
    "repeat_interleave(4, dim=1)": k.repeat_interleave(4, dim=1),
    "expand over a new axis": k[:, :, None].expand(-1, -1, 4, -1, -1),
    "that, reshaped to 8 heads": k[:, :, None].expand(-1, -1, 4, -1, -1).reshape(1, 8, 100, 16),
}
for name, tensor in forms.items():
    print(f"{name:29} {str(tuple(tensor.shape)):20} memory {lesson.storage(tensor):>6,} B, "
          f"{lesson.storage(tensor) / lesson.storage(k):.0f} times k")  # fmt: skip
print("both orders the same:", torch.equal(forms["repeat_interleave(4, dim=1)"],
                                           forms["that, reshaped to 8 heads"]))  # fmt: skip

# %% [markdown] id="copies-after" slideshow={"slide_type": "skip"}
# **`repeat_interleave` copies.** Only `expand` is a view, and reshaping it copies after all. The grouped einsum above needs neither, and torch's fused attention has
# the flag `enable_gqa=True` for the same purpose; the library uses it.

# %% [markdown] id="order-text" slideshow={"slide_type": "slide"}
# ### Break it: the order of the heads
#
# Query head $i$ reads key/value head $\lfloor i / g \rfloor$: each head repeated **in place** (0 0 1 1). Tiling (0 1 0 1) has the same
# shape, gives no error, and reads other heads' keys.

# %% id="order" tags=["output-only"]
v = torch.tensor([10.0, 20.0]).view(1, 2, 1, 1)  # one token; head 0 says 10, head 1 says 20
q, k = torch.zeros(1, 4, 1, 1), torch.zeros(1, 2, 1, 1)
right = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
print("torch's enable_gqa   ", right.flatten().tolist())
print("repeat_interleave    ", v.repeat_interleave(2, 1).flatten().tolist())
print("repeat: tiled (wrong)", lesson.tile_heads(v, 4).flatten().tolist())
torch.manual_seed(1)
model = ModernDecoder(Config())  # 8 query heads, 2 key/value heads
ids = torch.randint(1000, (1, 12))
with torch.no_grad():
    logits = model(ids)[0]
    apart = (with_mistakes(model, TiledHeads)(ids)[0] - logits).abs().max()
print(f"a decoder with tiled heads: logits change by up to {apart:.2f}, their own standard "
      f"deviation is {logits.std():.2f}")  # fmt: skip
try:
    Config(n_heads=5, n_kv_heads=3)
except ValueError as error:
    print("ValueError:", error)

# %% id="order-figure"
fig, axes = theme.figure(11, 2.3, ncols=2)
for ax, tiled in zip(axes, (False, True), strict=True):
    figures.draw_sketch(figures.head_graph(8, 2, tiled, width=520), ax)
    figures.title(ax, "tiled: wrong" if tiled else "in place: right")
wrong_heads = sum(a != b for a, b in zip(lesson.read_by(8, 2), lesson.read_by(8, 2, True),
                                         strict=True))  # fmt: skip
theme.show(
    fig,
    alt="Eight query heads on two key/value heads. In place: the first four read head 0. Tiled: "
    "even heads read head 0, so half of all heads read the wrong one.",
    summary=f"{wrong_heads} of 8 query heads read the wrong key/value head when tiled",
)

# %% [markdown] id="order-notes" slideshow={"slide_type": "notes"}
# **3 minutes.** The last line matters as well: `5 // 3` is 1, so code with a floor division would run and leave two query heads
# without keys. Refuse such a Config when it is written, not when it runs.

# %% [markdown] id="expanded-text" slideshow={"slide_type": "skip"}
# ### Break it: cache the expanded heads
#
# If the heads are repeated *before* they are stored, every logit stays right. Only the point of the exercise is lost.

# %% id="expanded" slideshow={"slide_type": "skip"}
sizes_of, logits_of = {}, {}
for name, m in {"K heads cached": model, "expanded": with_mistakes(model, CacheExpanded)}.items():
    caches = new_caches(m)
    with torch.no_grad():
        logits_of[name] = m(ids, caches)[0]
    sizes_of[name] = sum(cache.nbytes for cache in caches)
    print(f"{name:15} {sizes_of[name]:>7,} B for 12 tokens")
print("same logits:", torch.allclose(*logits_of.values(), atol=1e-4))
print(f"the expanded cache is {sizes_of['expanded'] / sizes_of['K heads cached']:.0f} times as "
      f"large: the group size is {model.cfg.group_size}")  # fmt: skip

# %% [markdown] id="count-text" slideshow={"slide_type": "slide"}
# ## 3 · Count: a product of six numbers
#
# $$\text{bytes} = B \cdot T \cdot L \cdot K \cdot (d_k + d_v) \cdot s$$
#
# rows, tokens, layers, key/value heads, what a head leaves ($2 h$ if keys and values are equally wide), bytes a value.

# %% [markdown] id="measured-text" slideshow={"slide_type": "skip"}
# A live cache must hold exactly this many bytes. Does it? The next cell fills caches of small decoders, eight tokens in three rows, and
# measures.

# %% id="measured" slideshow={"slide_type": "skip"}
for K, dtype in ((8, torch.float32), (2, torch.float32), (2, torch.bfloat16), (1, torch.bfloat16)):
    small = ModernDecoder(Config(n_kv_heads=K, **sizes)).to(dtype)
    caches = new_caches(small)
    with torch.no_grad():
        small(torch.randint(100, (3, 7)), caches)
        small(torch.randint(100, (3, 1)), caches, pos_offset=7)
    live = sum(cache.nbytes for cache in caches)
    formula = 3 * 8 * 2 * K * (16 + 16) * dtype.itemsize
    counted = cache_bytes(small.cfg, tokens=8, batch=3, dtype=dtype)
    print(f"K = {K}, {str(dtype)[6:]:8} live {live:>6,} B, formula {formula:>6,} B, equal: "
          f"{live == formula == counted}")  # fmt: skip

# %% [markdown] id="measured-after" slideshow={"slide_type": "skip"}
# Every factor is a choice of design. The number of key/value heads is the one this section turns; fewer layers with a
# cache, narrower heads and fewer bits work on the same product. Module 10 cuts $T$.
#
# Now the sizes of a real model: 80 layers, 64 query heads of width `128` in bfloat16. The last line has the sizes of DeepSeek-V3 and MLA, the subject of section 4.

# %% id="worked" tags=["output-only"]
GIB = 2**30
big = dict(n_layers=80, n_heads=64, d_head=128, n_experts=0, first_k_dense=0)
latent = MLA(kv_lora_rank=512, d_rope=64, d_nope=128, d_value=128, q_lora_rank=1536)
shapes = {
    "80 layers, MHA 64": Config(n_kv_heads=64, **big),
    "80 layers, GQA 8": Config(n_kv_heads=8, **big),
    "80 layers, MQA 1": Config(n_kv_heads=1, **big),
    "61 layers, MLA": Config(**{**big, "n_layers": 61, "n_heads": 128},
                             n_kv_heads=128, attention=latent),
}  # fmt: skip
print(f"{'':29}{'KiB a token':>12}{'GiB at 32,768':>15}{'at 131,072':>12}")
for name, c in shapes.items():
    row = [cache_bytes(c, T) for T in (1, 32768, 131072)]
    cells = f"{row[0] / 2**10:>12,.5g}{row[1] / GIB:>15.5g}{row[2] / GIB:>12.5g}"
    print(f"{name:29}{cells}")

# %% id="worked-plot"
tokens = [2**i for i in range(10, 21)]
curves = {name: [cache_bytes(c, T) / 1e9 for T in tokens] for name, c in shapes.items()}
fig, ax = theme.figure(11, 2.7)
figures.draw_growth(tokens, curves, {"24 GB": 24, "80 GB": 80}, ax)
theme.save(fig, "09_growth")
filled = {name: int(80e9 // cache_bytes(c, 1)) for name, c in shapes.items()}
theme.show(
    fig,
    alt="Cache against tokens, both logarithmic: four parallel lines. Every variant grows in "
    "proportion to the text; they cross the memory of a device at different lengths.",
    summary="one request fills 80 GB at "
    + ", ".join(f"{n:,} tokens ({name})" for name, n in filled.items()),
)

# %% [markdown] id="worked-notes" slideshow={"slide_type": "notes"}
# **5 minutes.** `80`, `10`, `1.25`: let the room divide. Someone will say that a cache of that first size "cannot be served". It does not
# fit beside the weights on one device; it can be split over devices, moved to host memory, or kept in fewer bits.

# %% [markdown] id="units-text" slideshow={"slide_type": "skip"}
# ### Units, and three ways to misread a configuration
#
# A GiB is $2^{30}$ bytes, a GB is $10^9$. The cache above is `80` GiB or `85.9` GB; a device sold with "80 GB" does not hold it even when
# it is empty.

# %% id="units" slideshow={"slide_type": "skip"}
mha = cache_bytes(shapes["80 layers, MHA 64"], 32768)
print(f"{mha / GIB:.0f} GiB = {mha / 1e9:.1f} GB; a GiB is {GIB / 1e9 - 1:.1%} more than a GB")
print(f"{'':14}{'H h':>7}{'D':>7}   cache of 32,768 tokens with h from the file, with D // H")
for name in ("Qwen3-0.6B", "GLM-4.5", "gpt-oss-120b", "Llama-3-8B"):
    m = published(name)
    divided = replace(m, d_head=m.d_model // m.n_heads, layers=())
    right = published_cache_bytes(m, 32768, windows=False)
    wrong = published_cache_bytes(divided, 32768)
    print(f"{name:14}{m.n_heads * m.d_head:>7,}{m.d_model:>7,}   {right / GIB:.3f} GiB, "
          f"{wrong / GIB:.3f} GiB: {wrong / right:.2f} of the truth")  # fmt: skip

# %% [markdown] id="units-after" slideshow={"slide_type": "skip"}
# **The width of a head is a number of its own.** `D // H` is right for some models and wrong by more than a factor of two for others. If the
# configuration says `head_dim`, use it.
#
# How many *requests* does sharing buy? Take 32 layers, heads of width `128`, requests of `8192` tokens, and `10` GB left for caches.

# %% id="requests" slideshow={"slide_type": "skip"}
for K in (32, 8, 1):
    c = Config(n_layers=32, n_heads=32, n_kv_heads=K, d_head=128, n_experts=0, first_k_dense=0)
    one = cache_bytes(c, 8192)
    print(f"K = {K:>2}: {one / GIB:.3f} GiB a request, {int(10e9 // one)} requests together")

# %% [markdown] id="requests-after" slideshow={"slide_type": "skip"}
# One request fits in all three cases. The difference is how many fit *together*, and every one of them can share the
# reading of the weights.

# %% [markdown] id="exercise-size-text" slideshow={"slide_type": "skip"}
# ### Your turn: size a cache
#
# Fill in the function and run the cell; you may come back to the lines on MLA after section 4. The check compares with the
# library and names the mistakes it knows.


# %% id="exercise-cache-size" tags=["exercise:cache_size"] slideshow={"slide_type": "skip"}
def cache_size(cfg, tokens, batch, dtype):
    """Bytes of the key/value cache of ModernDecoder(cfg) for `batch` rows of `tokens` tokens."""
    # 1. cfg.attention is a GQA or an MLA: isinstance(cfg.attention, MLA) tells.
    # 2. GQA: a token leaves cfg.n_kv_heads keys and as many values, cfg.d_head wide, in each layer.
    # 3. MLA: one latent and one rotated key (kv_lora_rank, d_rope), for all heads together.
    # 4. GQA(window=...) keeps at most `window` tokens; dtype.itemsize is the bytes of a value.
    ...


cache_size = check("cache_size", cache_size).use

# %% [markdown] id="models-text" slideshow={"slide_type": "slide"}
# ### Published models
#
# Read from their configurations, in KiB a token with all layers keeping all tokens. The pale part is what windowed layers spare at
# long lengths (module 10).

# %% id="models"
chosen = ("OLMo-2-7B", "Gemma-3-27B", "GLM-4.5", "Llama-3-70B", "MiniMax-M2", "Llama-4-Maverick",
          "Qwen3-235B-A22B", "Llama-3-8B", "Qwen3-30B-A3B", "GLM-5", "gpt-oss-120b", "DeepSeek-V3",
          "Qwen3-Next-80B-A3B", "SmolLM2-135M", "Kimi-Linear-48B", "Nemotron-3-Nano")  # fmt: skip


def kind(m):
    if sum(part.n for part in cached_layers(m)) < m.n_layers:
        return "few layers"
    shared = "MHA" if m.n_kv_heads == m.n_heads else "GQA"
    return "MLA" if isinstance(m.attention, MLA) else shared


rows = []
for m in map(published, chosen):
    whole, spared = (published_cache_bytes(m, 2**17, windows=w) / 2**27 for w in (False, True))
    rows.append((m.name, whole, spared, kind(m)))
rows.sort(key=lambda row: -row[1])
fig, ax = theme.figure(11, 4.2)
figures.draw_models(rows, ax)
theme.save(fig, "09_models")
theme.show(
    fig,
    alt="Sixteen models: hundreds of KiB a token with many heads, less than ten with few layers.",
    summary=", ".join(f"{name} {whole:g}" for name, whole, _, _ in rows) + " KiB a token",
)

# %% [markdown] id="models-notes" slideshow={"slide_type": "notes"}
# **4 minutes.** Size of the model and size of its cache have little to do with each other: compare the smallest model of the list
# with the largest. Ask why Olmo 2 could afford MHA (its own context is short).

# %% id="models-table" slideshow={"slide_type": "skip"}
heads = ("H / K", "width", "KiB", "GiB at 32k", "128k", "32k with windows")
widths = (9, 7, 9, 12, 8, 18)
print(f"{'':20}" + "".join(f"{a:>{b}}" for a, b in zip(heads, widths, strict=True)))
shown = ("OLMo-2-7B", "Gemma-3-27B", "GLM-4.5", "Llama-3-70B", "Qwen3-32B", "MiniMax-M2",
         "Trinity-Large", "Llama-4-Maverick", "Qwen3-235B-A22B", "Qwen3-14B", "Mistral-Small-3.1",
         "Qwen3-8B", "Qwen3-4B", "Llama-3-8B", "Qwen3-0.6B", "Qwen3-30B-A3B", "GLM-5",
         "gpt-oss-120b", "SmolLM3-3B", "DeepSeek-V3", "Kimi-K2", "Mistral-Large-3", "gpt-oss-20b",
         "Qwen3-Next-80B-A3B", "Kimi-Linear-48B", "Nemotron-3-Nano", "Gemma-4-31B")  # fmt: skip
for m in map(published, shown):
    whole = [published_cache_bytes(m, T, windows=False) for T in (1, 2**15, 2**17)]
    heads = f"{m.n_heads} / {m.n_kv_heads}" if m.n_kv_heads else f"{m.n_heads}"
    print(f"{m.name:20}{heads:>9}{lesson.head_width(m) or '':>7}{whole[0] / 2**10:>9.5g}"
          f"{whole[1] / GIB:>12.4g}{whole[2] / GIB:>8.4g}"
          f"{published_cache_bytes(m, 2**15) / GIB:>18.4g}")  # fmt: skip

# %% [markdown] id="models-after" slideshow={"slide_type": "skip"}
# The lines with one number of heads are MLA models, except Gemma 4, whose layers differ. (GLM-5 also keeps the keys of an indexer, and the models with few
# cached layers a state of fixed size; neither is counted here.)
#
# Families are not uniform. "Qwen3 has so many key/value heads" or "Gemma shares in pairs" are sentences about one size:

# %% id="families" slideshow={"slide_type": "skip"}
sizes_of_qwen = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B",
                 "Qwen3-30B-A3B", "Qwen3-235B-A22B")  # fmt: skip
for name in (*sizes_of_qwen, "Gemma-3-1B", "Gemma-3-27B"):
    m = published(name)
    print(f"{name:16} {m.n_heads:>2} query heads, {m.n_kv_heads:>2} key/value heads: groups of "
          f"{lesson.group_of(m.n_heads, m.n_kv_heads)}")  # fmt: skip
local, everywhere = cached_layers(published("Gemma-4-31B"))
print(f"Gemma-4-31B      32 query heads: {local.n} layers with a window of {local.window} keep "
      f"{local.values:,} values (16 heads of 256), {everywhere.n} keep "
      f"{everywhere.values:,} (4 of 512)")  # fmt: skip

# %% [markdown] id="calculator-text" slideshow={"slide_type": "slide"}
# ### Turn it: how large, how many, how fast at most?
#
# Any model of the list, any length. The speed is a **bound**: each step must read the weights and all caches once, and the memory has a
# bandwidth. A mixture's step reads the experts that its tokens are expected to need.

# %% id="calculator"
EXPLORABLES["kv_calculator"]()

# %% [markdown] id="calculator-notes" slideshow={"slide_type": "notes"}
# **5 minutes.** Set `128` requests of `32,768` tokens: the reading of caches now dwarfs that of weights. Switch the attention to MHA, then to MLA. Then to
# 4 bits a cached value: the third dial, independent of the heads.

# %% [markdown] id="devices-text" slideshow={"slide_type": "skip"}
# ### Several devices: when there are more of them than heads
#
# Tensor parallelism gives each device some query heads and the key/value heads that they read. With 16 query heads on 8 key/value heads and 16 devices, two devices need
# the same one.

# %% id="devices" slideshow={"slide_type": "skip"}
torch.manual_seed(2)
wide = Config(d_model=64, n_heads=16, n_kv_heads=8, d_head=8, n_experts=0, first_k_dense=0,
              attention=GQA(qk_norm=False))  # fmt: skip
attn = GroupedQueryAttention(wide)
cos8, sin8 = RotaryTable(wide)(torch.arange(5))
q = apply_rope(split_heads(attn.W_q(x), 16), cos8, sin8)
k = apply_rope(split_heads(attn.W_k(x), 8), cos8, sin8)
v = split_heads(attn.W_v(x), 8)
for devices in (4, 8, 16):
    parts, held = 0, 0
    for mine, needed in lesson.heads_by_device(16, 8, devices):
        heads = grouped_attention(q[:, mine], k[:, needed], v[:, needed])
        rows = attn.W_o.weight.unflatten(1, (16, 8))[:, mine].flatten(1)
        parts = parts + merge_heads(heads) @ rows.T  # the sum over devices
        held += 2 * len(needed) * 8
    same = torch.allclose(parts, attn(x, cos8, sin8), atol=1e-5)
    print(f"{devices:>2} devices: sum of their outputs right: {same}; {held} values a token kept "
          f"in all, {held / kv(8, 8):.0f} times one cache")  # fmt: skip

# %% [markdown] id="devices-after" slideshow={"slide_type": "skip"}
# Up to as many devices as key/value heads, the cache is divided. Beyond that it is **replicated**: 16 devices hold it twice, and none gets
# less. A plan that divides the bytes by the number of devices is wrong by that factor. MLA's latent has no heads to divide: every
# device that holds some of the heads needs all of it, unless the *requests* are divided instead.

# %% [markdown] id="latent-text" slideshow={"slide_type": "slide"}
# ## 4 · Compress: one latent for all heads
#
# Sharing makes heads read the *same* keys. Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) keeps them different, and stores
# one short vector from which all of them can be made:
#
# $$c = \mathrm{RMSNorm}(W_{dkv}\, x) \in \mathbb{R}^r, \qquad k_i = U_{k,i}\, c, \qquad v_i = U_{v,i}\, c$$
#
# Each head $i$ has its own matrices $U$. First without positions, in float64, so that equal means equal.


# %% id="latent" tags=["output-only"]
def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


torch.manual_seed(3)
H, S, r, n, w = 4, 10, 12, 8, 6  # heads, tokens, latent, key width, value width
c = draw(1, S, r)  # the latents of ten tokens: all that is cached
q = draw(1, H, 3, n)  # queries of the last three tokens
U_k, U_v = draw(H, n, r) / 3, draw(H, w, r) / 3
mask = causal_mask(3, S)

k, v = c[:, None] @ U_k.mT, c[:, None] @ U_v.mT  # expand: (B, H, S, n), (B, H, S, w)
naive = F.scaled_dot_product_attention(q, k, v, mask)
print("cached", tuple(c.shape), "- expanded to k", tuple(k.shape), "and v", tuple(v.shape))
print("heads", tuple(naive.shape))
print(f"values cached {c.numel()}, values of the expanded heads {k.numel() + v.numel()}")

# %% [markdown] id="absorb-text" slideshow={"slide_type": "slide"}
# ### Two absorptions: never make a key, never make a value
#
# Associativity moves $U_k$ to the query and $U_v$ behind the sum:
#
# $$q_i^\top (U_{k,i}\, c_s) = (U_{k,i}^\top q_i)^\top c_s \qquad\quad \sum_s a_s\, (U_{v,i}\, c_s) = U_{v,i} \Big(\sum_s a_s\, c_s\Big)$$
#
# Left: one product for a new query replaces one for every cached token. Right: the weights sum latents, and one product leads out. The
# softmax between them stays **per head**.

# %% id="absorb" tags=["output-only"]
inside = q @ U_k  # (B, H, T, r): the query in the latent
scores = inside @ c[:, None].mT
weights = (scores / math.sqrt(n)).masked_fill(~mask, -torch.inf).softmax(-1)
summed = weights @ c[:, None]  # (B, H, T, r): a sum of latents
absorbed = summed @ U_v.mT  # (B, H, T, w)
W_o = draw(H, w, 16)  # W_o by head: U_v and W_o merge into one matrix as well
merged = torch.einsum("bhtr,hwr,hwd->btd", summed, U_v, W_o)
print("query in the latent", tuple(inside.shape), "sum of latents", tuple(summed.shape))
for name, a, b in (
    ("scores without keys", scores, q @ k.mT),
    ("heads without values", absorbed, naive),
    ("U_v merged into W_o", merged, torch.einsum("bhtw,hwd->btd", naive, W_o)),
):
    print(f"{name:20} equal, < 1e-12: {((a - b).abs().max() < 1e-12).item()}")

# %% [markdown] id="absorb-notes" slideshow={"slide_type": "notes"}
# **6 minutes.** Write the two lines on the board and move the brackets with a finger. Seen from the cache, absorbed MLA is multi-query
# attention: one key head and one value head of width r, which are the *same* vector.

# %% [markdown] id="scale-text" slideshow={"slide_type": "skip"}
# Two slips are easy here. The scale belongs to the width of the *heads*, not to that of the latent in which the product happens to run. And
# that all heads read one latent does not mean one softmax for all.


# %% id="scale" slideshow={"slide_type": "skip"}
def with_slip(scale, joint=False):
    scores = (inside @ c[:, None].mT / scale).masked_fill(~mask, -torch.inf)
    if joint:  # one distribution over the keys of all heads
        flat = scores.transpose(1, 2).flatten(2).softmax(-1)  # (B, T, H S)
        weights = flat.unflatten(-1, (H, S)).transpose(1, 2)
    else:
        weights = scores.softmax(-1)
    return lesson.relative_error(weights @ c[:, None] @ U_v.mT, naive)


print(f"scale 1 / sqrt({r}), the latent's, and not 1 / sqrt({n}): error {with_slip(r**0.5):.2f}")
print(f"one softmax across the heads: error {with_slip(n**0.5, joint=True):.2f}")

# %% [markdown] id="scale-after" slideshow={"slide_type": "skip"}
# (All errors here are relative: the length of the difference over the length of the right output.) The first slip is nasty, because it is small: it sharpens
# or flattens the softmax a little, everywhere. The first token of a text does not show it at all, since a single key has weight 1.

# %% [markdown] id="rope-text" slideshow={"slide_type": "slide"}
# ### Why positions get in the way
#
# RoPE turns a query at $m$ and a key at $s$ by their positions; $R_{m-s}$ remains between them (module 05). With keys made from a latent:
#
# $$(R_m q)^\top (R_s U_k c_s) = q^\top R_{m-s}^\top\, U_k\, c_s$$
#
# The matrix between $q$ and $c_s$ now **differs for every key**. Rotating *after* expanding is no problem: the naive form works. What is lost is the one absorbed product.

# %% id="rope" tags=["output-only"]
cos, sin = (t.double() for t in RotaryTable(Config(d_head=n))(torch.arange(S)))
q_turned = apply_rope(q, cos[-3:], sin[-3:])  # positions 7, 8, 9
right = (q_turned @ apply_rope(k, cos, sin).mT)[..., mask]  # turned after expanding

distance = (torch.arange(7, 10)[:, None] - torch.arange(S)).clamp(min=0)  # (T, S)
apart = apply_rope(q[..., None, :].expand(-1, -1, -1, S, -1), cos[distance], sin[distance])
one_each = torch.einsum("bhtsr,bsr->bhts", torch.einsum("bhtsn,hnr->bhtsr", apart, U_k), c)
print("one matrix a distance: right, < 1e-6:",
      ((one_each[..., mask] - right).abs().max() < 1e-6).item(),
      f"- but {S} absorbed queries for each query")  # fmt: skip

wide = (t.double() for t in RotaryTable(Config(d_head=r))(torch.arange(S)))
tries = {
    "keys not turned at all": c,
    "RoPE on the latent instead": apply_rope(c, *wide),
}
for name, latents in tries.items():
    wrong = (q_turned @ U_k @ latents[:, None].mT)[..., mask]
    print(f"{name:28} error of the scores {lesson.relative_error(wrong, right):.2f}")

# %% [markdown] id="rope-notes" slideshow={"slide_type": "notes"}
# **5 minutes.** The common sentence "RoPE cannot be applied to a decompressed key" is wrong: the first line of the cell does it. The right sentence: *then nothing can be absorbed
# any more*, and each step would have to expand the whole cache.

# %% [markdown] id="rope-after" slideshow={"slide_type": "skip"}
# The first line of the output absorbs a matrix of its own for each distance. That is exact, and it needs as many absorbed queries as there are cached
# tokens, so nothing is gained. The other two lines have one absorbed query, and wrong scores. In particular, turning the *latent* by RoPE is not the same as turning the keys made from
# it, because $U_k$ and a rotation do not commute.

# %% [markdown] id="decoupled-text" slideshow={"slide_type": "slide"}
# ### The way out: a second, small key that carries the position
#
# Each query head gets $p$ more channels, and each token **one** more key of width $p$ for all heads. Only these are rotated:
#
# $$\text{score}_{i}(m, s) = \frac{q_i^{\text{nope}\,\top} U_{k,i}\, c_s + (R_m q_i^{\text{rope}})^\top (R_s k_s^{\text{rope}})}{\sqrt{n + p}}$$
#
# Cached are $c_s$ and $R_s k_s^{\text{rope}}$: $r + p$ numbers a token and layer. Nothing else.

# %% [markdown] id="decoupled-notes" slideshow={"slide_type": "notes"}
# **4 minutes.** "Nope" stands for *no position embedding*, "rope" for the rotated part. Ask what is shared in which way: the latent is shared and expanded per head,
# the rotated key is shared as it is, as in multi-query attention.

# %% [markdown] id="exercise-absorbed-text" slideshow={"slide_type": "skip"}
# ### Your turn: attention in the latent
#
# Write the core of MLA with its cache. The check runs it in chunks of several sizes, so that old tokens come from the cache.


# %% id="exercise-absorbed-attention" tags=["exercise:absorbed_attention"] slideshow={"slide_type": "skip"}
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

# %% [markdown] id="whole-text" slideshow={"slide_type": "skip"}
# Now the whole layer around it, in plain torch, against both forms of the library's layer: whole, and in chunks with a cache.

# %% id="whole" slideshow={"slide_type": "skip"}
torch.manual_seed(4)
part = MLA(kv_lora_rank=24, d_rope=8, d_nope=16, d_value=12)
cfg = Config(d_model=64, n_heads=4, attention=part, n_experts=0, first_k_dense=0)
mla = MultiHeadLatentAttention(cfg).double()
x, (cos, sin) = draw(2, 9, 64), RotaryTable(cfg)(torch.arange(9))


def by_hand(x, cos, sin, cache):
    q = split_heads(x @ mla.W_q.weight.T, 4)
    q_nope, q_rope = q.split((16, 8), dim=-1)
    latent, k_rope = (x @ mla.W_dkv.weight.T).split((24, 8), dim=-1)
    q_rope, k_rope = apply_rope(q_rope, cos, sin), apply_rope(k_rope, cos, sin)
    U_k, U_v = (W.weight.unflatten(0, (4, -1)) for W in (mla.W_uk, mla.W_uv))
    heads = absorbed_attention(q_nope, q_rope, mla.kv_norm(latent), k_rope, U_k, U_v, cache)
    return merge_heads(heads) @ mla.W_o.weight.T


want = mla(x, cos, sin)
cache, parts = KVCache(), []
for a, b in ((0, 4), (4, 5), (5, 9)):
    parts.append(by_hand(x[:, a:b], cos[a:b], sin[a:b], cache))
print("cached", [tuple(t.shape) for t in cache.held()], f"= {cache.nbytes // 2 // 9 // 8} values a "
      "token")  # fmt: skip
print(f"by hand, in chunks = library, absorbed, < 1e-10: "
      f"{((torch.cat(parts, 1) - want).abs().max() < 1e-10).item()}")  # fmt: skip

# %% id="forms" slideshow={"slide_type": "skip"}
naive = MultiHeadLatentAttention(replace(cfg, attention=replace(part, form="naive"))).double()
naive.load_state_dict(mla.state_dict())
worst = (naive(x, cos, sin) - want).abs().max()
for chunks in ((9,), (4, 1, 4), (1,) * 9, (2, 7)):
    for module in (mla, naive):
        cache, parts, at = KVCache(), [], 0
        for size in chunks:
            piece = slice(at, at + size)
            parts.append(module(x[:, piece], cos[piece], sin[piece], cache))
            at += size
        worst = torch.maximum(worst, (torch.cat(parts, 1) - want).abs().max())
print(f"naive = absorbed, whole and in 4 ways of chunks, < 1e-10: {(worst < 1e-10).item()}")
print("values a token and layer:", cache_values(cfg), "= r + p =", part.kv_lora_rank + part.d_rope)

# %% [markdown] id="v3-text" slideshow={"slide_type": "slide"}
# ### DeepSeek-V3 in numbers
#
# $r = 512$, $p = 64$, `128` heads of `128` unrotated and 64 rotated channels, values of width `128`. "How many times smaller?" has more than one answer: it depends on
# what one compares with.

# %% id="v3" tags=["output-only"]
v3 = published("DeepSeek-V3").config()
mla_bytes, L, T = cache_values(v3), v3.n_layers, 32768
print(f"{mla_bytes} values a token and layer, {cache_bytes(v3, 1) / 2**10} KiB a token over "
      f"{L} layers, {cache_bytes(v3, T) / GIB:.4f} GiB at 32,768 tokens")  # fmt: skip
against = {
    "MHA of equal widths, 128 and 128": kv(128, 128),
    "its own heads expanded, 192 and 128": kv(128, 128 + 64, 128),
    "Kimi K2, 64 heads, equal widths": kv(64, 128),
    "GQA with 8 heads of 128": kv(8, 128),
    "counted as 2 H d_nope (wrong)": 2 * v3.n_heads * v3.attention.d_nope,
}
for name, values in against.items():
    per_token = 2 * L * values
    print(f"{name:36}{values:>7,} values, {per_token / 2**10:>7,.5g} KiB a token, "
          f"{per_token * T / GIB:>6.5g} GiB: {values / mla_bytes:.1f} x")  # fmt: skip
print(f"as many values as GQA with {mla_bytes / kv(1, 128)} heads of 128")

# %% [markdown] id="v3-notes" slideshow={"slide_type": "notes"}
# **4 minutes.** `56.9` is the factor that is usually quoted, against an MHA that nobody built. Against the heads that this very model would have to keep, it is `71.1`. Against GQA with 8 heads, the
# usual choice elsewhere, it is `3.6`. All three are right; say which one you mean.

# %% [markdown] id="qrank-text" slideshow={"slide_type": "skip"}
# **The queries are compressed too**, through a bottleneck of rank `1536` in DeepSeek-V3 and Kimi K2. This saves no cache, since queries are not cached. It is part of the model all the same, in training *and*
# in use: it has its own weights and a norm in the middle. (An implementation may fuse products; it cannot drop the norm.)

# %% id="qrank" slideshow={"slide_type": "skip"}
for rank in (1536, None):
    c_ = replace(v3, attention=replace(v3.attention, q_lora_rank=rank))
    query = sum(p.numel() for p in meta_attention(c_).W_q.parameters())
    print(f"q_lora_rank {str(rank):5} query weights {query / 1e6:>6.1f} M of "
          f"{count_parameters(c_).attention / L / 1e6:.1f} M a layer, cache {cache_values(c_)} "
          "values")  # fmt: skip

# %% [markdown] id="cell-text" slideshow={"slide_type": "slide"}
# ### Turn it: inside the cell
#
# Each box shows what leaves it. Switch between *absorbed* and *naive*; then raise the number of new tokens, with few cached ones, and see which
# form needs less work.

# %% id="cell"
EXPLORABLES["mla_cell"]()

# %% [markdown] id="cell-notes" slideshow={"slide_type": "notes"}
# **5 minutes.** With one new token the naive form expands the whole cache at every step. With a thousand new ones and an empty cache it wins, because its heads are narrower than the latent. Real servers use both: naive for the prompt,
# absorbed for writing.

# %% [markdown] id="block-text" slideshow={"slide_type": "slide"}
# ## 5 · Into the block: one line of the Config
#
# The decoder of module 16 does not know which attention it runs. A variant says what a token leaves behind (`cache_spec`), and cache, generation,
# byte counts, trace and diagram follow.

# %% id="block" slideshow={"slide_type": "skip"}
torch.manual_seed(0)
grouped = Config()
compressed = replace(grouped, attention=MLA())  # the one change
decoders = {"GQA": ModernDecoder(grouped), "MLA": ModernDecoder(compressed)}
ids = torch.randint(1000, (1, 6))
runs = {name: trace(m, ids) for name, m in decoders.items()}
for name, m in decoders.items():
    names = [stage.name.removeprefix("attn.") for stage in runs[name].under("blocks.1")]
    stages = names[names.index("q") : names.index("concat") + 1]
    print(name, "leaves", m.blocks[1].attn.cache_spec())
    print("    stages:", ", ".join(stages))

# %% id="block-diagram"
diagrams.block(decoders["MLA"], runs["MLA"], layer=0)

# %% [markdown] id="block-notes" slideshow={"slide_type": "notes"}
# **4 minutes.** Click the cache box: its two shapes are what the memory holds. Compare with the diagram of grouped-query attention, which the
# next cell shows for those who read along.

# %% id="block-diagram-gqa" slideshow={"slide_type": "skip"}
diagrams.block(decoders["GQA"], runs["GQA"], layer=0)

# %% [markdown] id="works-text" slideshow={"slide_type": "skip"}
# It builds, it trains, it generates; with a cache it says the same as without; and its cache is as large as the formula says.

# %% id="works" slideshow={"slide_type": "skip"}
torch.manual_seed(0)
batch = torch.randint(1000, (4, 16))
for name, m in decoders.items():
    caches, logits = new_caches(m), []
    with torch.no_grad():
        for piece in batch.split((7, 1, 5, 3), dim=1):
            logits.append(m(piece, caches, caches[0].length)[0])
        same = torch.allclose(torch.cat(logits, 1), m(batch)[0], atol=1e-4)
    live = sum(cache.nbytes for cache in caches)
    fits = live == cache_bytes(m.cfg, 16, 4, torch.float32)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.5)
    before = next_token_loss(m(batch)[0], batch)
    before.backward()
    optimizer.step()
    with torch.no_grad():
        less = (next_token_loss(m(batch)[0], batch) < before).item()
    print(f"{name}: cached = uncached {same}; live bytes {live:,}, as the formula {fits}; a step "
          f"lowers the loss {less}; "
          f"generates {m.generate(ids, 4, 0.0).shape[1] - 6} tokens")  # fmt: skip

# %% [markdown] id="reorder-text" slideshow={"slide_type": "skip"}
# ### Rows of a cache, whatever it holds
#
# Beam search continues some rows twice and drops others, and the cache has to follow. A known fault re-ranks the texts and forgets a cache because it does not look like keys and values; another copies in place and
# reads rows that it has already overwritten. The library's `reorder` gathers whatever the variant stored.

# %% id="reorder" slideshow={"slide_type": "skip"}
rows, source = torch.tensor([10, 20, 30]), torch.tensor([1, 0, 0])
in_place = rows.clone()
for to, come_from in enumerate(source.tolist()):
    in_place[to] = in_place[come_from]
print("gathered", rows[source].tolist(), " in place (wrong)", in_place.tolist(),
      " scattered (wrong)", torch.zeros_like(rows).scatter(0, source, rows).tolist())  # fmt: skip
for name, m in decoders.items():
    caches = new_caches(m)
    with torch.no_grad():
        m(batch[:3, :8], caches)
        for cache in caches:
            cache.reorder(source)
        after = m(batch[:3, 8:9], caches, pos_offset=8)[0]
        want = m(torch.cat((batch[source, :8], batch[:3, 8:9]), 1))[0][:, -1:]
    print(f"{name}: goes on as if read in the new order: {torch.allclose(after, want, atol=1e-4)}")

# %% [markdown] id="intensity-text" slideshow={"slide_type": "slide"}
# ## 6 · Bytes are not all: work for each byte
#
# A device can do so many FLOP in the time in which it reads a byte; their ratio is the **ridge**. Work with fewer FLOP a byte waits for memory. While
# writing, each cached number is read once a step. How many FLOP does it feed?

# %% id="intensity" tags=["output-only"]
from torch.utils.flop_counter import FlopCounterMode


def measured_intensity(H, K, key, value, cached):
    """Torch's own FLOP count of one decode step over 1024 tokens, by the cache's bytes in bf16."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        q = torch.empty(K, H // K, key)  # one query, its heads by group
        q @ torch.empty(K, key, 1024) @ torch.empty(K, 1024, value)
    return counter.get_total_flops() / (1024 * 2 * cached)


points = {}
for K in (64, 16, 8, 4):
    c_ = Config(n_heads=64, n_kv_heads=K, d_head=128)
    name = "MHA" if K == 64 else f"groups of {64 // K}"
    points[name] = measured_intensity(64, K, 128, 128, kv(K, 128))
    same = math.isclose(points[name], lesson.intensity(c_))
    print(f"64 query heads on {K:>2}: {lesson.intensity(c_):.0f} FLOP a byte, as measured: {same}")
points["MLA"] = measured_intensity(128, 1, 512 + 64, 512, 512 + 64)
print(f"MLA absorbed, 128 heads: {lesson.intensity(v3):.1f} FLOP a byte, as measured: "
      f"{math.isclose(points['MLA'], lesson.intensity(v3))}")  # fmt: skip
print(
    f"MLA naive expands first: {lesson.expansion_flops(v3) / (2 * mla_bytes):,.0f} more FLOP a byte"
)

# %% id="roofline" slideshow={"slide_type": "subslide"}
fig, axes = theme.figure(12, 4.0, ncols=2)
shown = {name: (value, "scores" if name == "MLA" else "cache") for name, value in points.items()}
for device, ax in zip(lesson.DEVICES[1:], axes, strict=True):
    figures.draw_roofline(device, shown, ax)
theme.save(fig, "09_roofline")
share = {d.name: min(1, points["MLA"] / d.ridge) for d in lesson.DEVICES[1:]}
theme.show(
    fig,
    alt="Two rooflines. Grouped-query attention with groups of 1 to 16 lies on the slope, far left "
    "of the ridge; absorbed latent attention lies near the ridge.",
    summary=", ".join(f"ridge of {d.name} {d.ridge:.0f}" for d in lesson.DEVICES[1:])
    + f"; MLA {points['MLA']:.0f}, which reaches "
    + ", ".join(f"{part:.0%} of it on {name}" for name, part in share.items()),
)

# %% [markdown] id="intensity-notes" slideshow={"slide_type": "notes"}
# **5 minutes.** "Decoding is limited by memory" is right for MHA and GQA, by a wide margin. Absorbed MLA stands at the ridge: there, more arithmetic costs time. Ask which way a
# cache in 8 bits moves the points. (To the right: half the bytes, the same FLOP.)

# %% [markdown] id="intensity-after" slideshow={"slide_type": "skip"}
# Why does grouping *raise* the intensity? Each cached number is multiplied and added once for each of the $g$ heads that read it: $2g$ FLOP for its two bytes in bf16, so $g$ FLOP a byte. MLA does it for all `128` heads, and each
# latent serves twice, as key and as value.
#
# These are the peaks of data sheets, for the attention over the cache alone. The weights are another story: their intensity grows with the number of requests (module 14), the cache's does not, since
# each request has its own.

# %% id="intensity-explore" slideshow={"slide_type": "skip"}
EXPLORABLES["kv_intensity"]()

# %% [markdown] id="quality-text" slideshow={"slide_type": "slide"}
# ## 7 · What is claimed about quality
#
# | who | reports | keep in mind |
# |---|---|---|
# | GQA paper, 2305.13245 | close to MHA, much faster; heads pooled, then trained on with `5%` of the compute | T5, an encoder-decoder |
# | Llama 2, 2307.09288 | GQA about as good as MHA in an ablation | their own sizes and data |
# | DeepSeek-V2, 2405.04434 | GQA and MQA below MHA, MLA above | by MLA's authors; no GQA with equally many bytes |
#
# They do not agree, and no comparison here holds all else equal. **We conclude nothing.** Bytes and FLOP can be computed; quality must be measured, each
# time.

# %% [markdown] id="quality-notes" slideshow={"slide_type": "notes"}
# **3 minutes.** A good moment to ask what experiment would settle it: same data, same weights, same bytes of cache, several seeds. Then who could pay for it.

# %% [markdown] id="headline-text" slideshow={"slide_type": "skip"}
# ### A headline, recomputed
#
# DeepSeek-V2's abstract states a cache that is `93.3%` smaller than that of DeepSeek 67B, and `5.76` times its throughput. Is the first number MLA's doing? The older model had
# GQA with 8 heads; and section 3.2.3 of the report says that the deployed V2 keeps its cache in 6 bits.

# %% id="headline" slideshow={"slide_type": "skip"}
old, new = published("DeepSeek-LLM-67B"), published("DeepSeek-V2")
before = published_cache_bytes(old, 1)
for bits in (16, 6):
    after = published_cache_bytes(new, 1, bits=bits)
    print(f"V2 in {bits:>2} bits: {after:>6,} B a token against {before:,}: "
          f"{1 - after / before:.1%} smaller")  # fmt: skip

# %% [markdown] id="headline-after" slideshow={"slide_type": "skip"}
# So MLA accounts for `82.2%`, and the bits for the rest. A reading that takes the headline as "MLA against MHA" is wrong twice.

# %% [markdown] id="smol-text" slideshow={"slide_type": "slide"}
# ## 8 · In a real model: SmolLM2's nine heads on three
#
# SmolLM2-135M-Instruct (Hugging Face, Apache-2.0, arXiv 2502.02737) has 9 query heads and 3 key/value heads of width 64 in each of its 30 layers.

# %% id="smol" slideshow={"slide_type": "skip"}
from course_lib.zoo.smollm2 import load_smollm2

smol, tokenizer = load_smollm2()
TEXT = (
    "The water cycle has no beginning. Rain falls on the hills, runs into streams, and the streams "
    "join to form a river that carries the water back to the sea. On the way some of it sinks into "
    "the ground."
)
ids = torch.tensor([tokenizer.encode(TEXT)])
run = trace(smol, ids, flops=False)
for stage in ("q_rotated", "k_rotated", "v", "scores"):
    print(f"{stage:10}", run[f"blocks.0.attn.{stage}"].shape, run[f"blocks.0.attn.{stage}"].axes)
caches = new_caches(smol)
with torch.no_grad():
    loss = next_token_loss(smol(ids, caches)[0], ids).item()
live, T = sum(cache.nbytes for cache in caches), ids.shape[1]
print(f"{T} tokens, loss {loss:.3f} nats a token; live cache {live:,} B in float32, as the "
      f"formula: {live == cache_bytes(smol.cfg, T, 1, torch.float32)}")  # fmt: skip
print(f"in bf16 {cache_bytes(smol.cfg, 1) / 2**10} KiB a token, as MHA "
      f"{3 * cache_bytes(smol.cfg, 1) / 2**10}; 8192 tokens "
      f"{cache_bytes(smol.cfg, 8192) / 2**20:.0f} MiB")  # fmt: skip

# %% [markdown] id="smol-pool-text" slideshow={"slide_type": "skip"}
# ### What does sharing further cost?
#
# The GQA paper turns a multi-head model into a grouped one by taking the **mean** of the key and value matrices of the heads to be merged, and then trains on. We do the first half: 3 heads become 1,
# in all layers or in some, and nothing is trained.


# %% id="smol-pool" slideshow={"slide_type": "skip"}
@torch.no_grad()
def loss_of(model):
    return next_token_loss(model(ids)[0], ids).item()


pooled = lesson.with_pooled_heads
losses = {
    "3 heads, as trained": loss,
    "1 head, layers 15 to 29": loss_of(pooled(smol, 1, layers=range(15, 30))),
    "1 head, layers 2 to 29": loss_of(pooled(smol, 1, layers=range(2, 30))),
    "1 head, layers 0 and 1": loss_of(pooled(smol, 1, layers=range(2))),
    "1 head, all layers": loss_of(pooled(smol, 1)),
    "the first of 3, all layers": loss_of(pooled(smol, 1, "first")),
    "3 heads, tiled (wrong)": loss_of(with_mistakes(smol, TiledHeads)),
}
chance = math.log(smol.cfg.vocab_size)
for name, value in losses.items():
    print(f"{name:27} {value:>5.2f} nats a token")
print(f"{'guessing evenly':27} {chance:>5.2f}")

# %% id="smol-layers"
short = ids[:, :36]
rises = lesson.losses_by_layer(smol, short, 1)
with torch.no_grad():
    base = next_token_loss(smol(short)[0], short).item()
rises = [value - base for value in rises]
fig, axes = theme.figure(12, 4.0, ncols=2, width_ratios=(1, 1.15))
figures.draw_losses(losses | {"guessing evenly": chance}, loss, axes[0])
figures.title(axes[0], "Merging 3 heads into 1, nothing trained")
figures.draw_by_layer(rises, axes[1])
figures.title(axes[1], "In one layer only: the first two cannot spare them")
theme.save(fig, "09_smollm2_pooled")
order = sorted(range(30), key=lambda i: -rises[i])
theme.show(
    fig,
    alt="Loss after merging SmolLM2's key/value heads: it rises far in all layers together; in "
    "single layers only the first two matter much.",
    summary=f"all layers {losses['1 head, all layers']:.2f}, as trained {loss:.2f}\n"
    f"one layer only: worst are layers {sorted(order[:2])}, {rises[order[0]]:.2f} and "
    f"{rises[order[1]]:.2f} more",
)

# %% [markdown] id="smol-notes" slideshow={"slide_type": "notes"}
# **5 minutes.** Take bets first: a third of the cache, what does it cost? Then: which layers? One short text, so read the shape and not the second digit; where a bar is negative, the text was a little
# luckier with the merged heads.

# %% [markdown] id="smol-why-text" slideshow={"slide_type": "skip"}
# **Sharing cannot be added afterwards for free.** The mean ruins the model as a whole; keeping one head and dropping the others ruins it more. Layer by layer most of the damage is small, yet it adds up. And the wrong order
# of the heads is worse than guessing evenly.
#
# Why does the mean fail? Because the heads have nothing in common to keep:

# %% id="smol-why" slideshow={"slide_type": "skip"}
alike = {"W_k": [], "W_v": []}
for block in smol.blocks:
    for name in alike:
        a, b, c_ = getattr(block.attn, name).weight.detach().unflatten(0, (3, -1)).flatten(1)
        alike[name] += [
            F.cosine_similarity(s, t, dim=0).item() for s, t in ((a, b), (a, c_), (b, c_))
        ]
for name, values in alike.items():
    print(f"{name}: largest cosine between two heads of a layer {max(map(abs, values)):.2f}")
same_group = torch.block_diag(*[torch.ones(3, 3)] * 3).bool()
other_head = ~torch.eye(9, dtype=torch.bool)
overlap = torch.stack(
    [lesson.agreement(run[f"blocks.{i}.attn.weights"].value[0]) for i in range(30)]
)
print(f"overlap of the attention of two query heads: same key/value head "
      f"{overlap[:, same_group & other_head].mean():.2f}, different ones "
      f"{overlap[:, ~same_group].mean():.2f}")  # fmt: skip

# %% [markdown] id="smol-why-after" slideshow={"slide_type": "skip"}
# The matrices of two key/value heads are all but orthogonal, so their mean is a third of each and no compromise. (Two heads could also agree up to a change of basis that their queries undo. The cosine does not see
# that, and neither does averaging.) What the *query* heads look at overlaps a little more within a group than across; much of the overlap is the first
# token, on which all heads rest (module 10).
#
# Your own sentence, any layer:

# %% id="smol-explore" slideshow={"slide_type": "skip"}
EXPLORABLES["smollm2_heads"]()

# %% [markdown] id="takeaways" slideshow={"slide_type": "slide"}
# ## Key takeaways
#
# * The cache is a product of six numbers: rows, tokens, layers, key/value heads, what a head leaves, bytes a value. Each can be turned.
# * GQA is a dial between MHA and MQA. Heads are repeated **in place**; cache them *before* they are repeated.
# * `h` is not `D / H`, a GiB is not a GB, and a device more than there are key/value heads saves nothing.
# * MLA keeps heads different and caches one latent and one rotated key a token: $r + p$ numbers. Both absorptions are associativity; the softmax stays per head.
# * RoPE between $q$ and $U_k$ blocks the absorption, so position has a small key of its own.
# * Sharing and compressing also raise the work for each byte: $g$ FLOP for GQA, near the ridge for absorbed MLA.
# * All of it changes the slope. The cache still grows with every token.

# %% [markdown] id="takeaways-notes" slideshow={"slide_type": "notes"}
# **2 minutes.** Back to the four squares: everybody should now be able to say what each one holds, and what it costs to read it.

# %% [markdown] id="check" slideshow={"slide_type": "skip"}
# ## Self-check
#
# Answer first, then open: the answers are computed by the folded cells below (click their bars); the fourth is text.
#
# **1.** Qwen3-235B has 94 layers and 4 key/value heads of width `128`. How many KiB does a token leave, in bf16?
#
# **2.** A colleague caches the *expanded* heads of Llama-3-8B. What is wrong with the output, and what with the memory?
#
# **3.** Derive both absorptions and check them on numbers of your own.
#
# **4.** Why does RoPE on the expanded keys block absorption, and why does rotating the latent not help?
#
# **5.** MHA, GQA with groups of 8, or absorbed MLA with `128` heads: which comes nearest to what the arithmetic units could do while writing?

# %% id="check-1" jupyter={"outputs_hidden": true, "source_hidden": true} slideshow={"slide_type": "skip"}
m = published("Qwen3-235B-A22B")
by_hand_ = 2 * m.n_layers * m.n_kv_heads * m.d_head * 2 / 2**10
print(f"1. 2 x {m.n_layers} x {m.n_kv_heads} x {m.d_head} values of 2 B: {by_hand_:.0f} KiB, as "
      f"the library: {by_hand_ == published_cache_bytes(m, 1) / 2**10}")  # fmt: skip

# %% id="check-2" jupyter={"outputs_hidden": true, "source_hidden": true} slideshow={"slide_type": "skip"}
m = published("Llama-3-8B")
right, expanded = published_cache_bytes(m, 8192), published_cache_bytes(
    replace(m, n_kv_heads=m.n_heads), 8192)  # fmt: skip
print(f"2. nothing in the output; {expanded / GIB:.0f} GiB instead of {right / GIB:.0f} at 8192 "
      f"tokens, {expanded / right:.0f} times as much to keep and to read")  # fmt: skip

# %% id="check-3" jupyter={"outputs_hidden": true, "source_hidden": true} slideshow={"slide_type": "skip"}
q_, U_, c_, a_ = draw(7), draw(7, 5), draw(9, 5), draw(9).softmax(0)
print("3. q (c U^T)^T = (q U) c^T, < 1e-12:",
      ((q_ @ (c_ @ U_.T).T - (q_ @ U_) @ c_.T).abs().max() < 1e-12).item())  # fmt: skip
print("   a (c U^T) = (a c) U^T, < 1e-12:  ",
      ((a_ @ (c_ @ U_.T) - (a_ @ c_) @ U_.T).abs().max() < 1e-12).item())  # fmt: skip

# %% [markdown] id="check-4" slideshow={"slide_type": "skip"}
# <details><summary>4. Why does RoPE block absorption?</summary>
#
# The score is $q^\top R_{m-s}^\top U_k c_s$. The rotation stands *between* the query and $U_k$ and depends on the distance, so each key would need an absorbed query of its own. $U_k$ and a rotation
# do not commute, so turning $c_s$ instead gives other scores: see the cell `rope`.
#
# </details>

# %% id="check-5" jupyter={"outputs_hidden": true, "source_hidden": true} slideshow={"slide_type": "skip"}
h200 = lesson.DEVICES[2]
for name in ("MHA", "groups of 8", "MLA"):
    value = points[name]
    print(f"5. {name:17} {value:>5.0f} FLOP a byte, ridge {h200.ridge:.0f}: at most "
          f"{min(1, value / h200.ridge):.1%} of the peak")  # fmt: skip

# %% [markdown] id="sources" slideshow={"slide_type": "skip"}
# ## Sources
#
# Multi-query attention: Shazeer, arXiv 1911.02150 · Grouped-query attention: Ainslie et al., 2305.13245 · Llama 2: 2307.09288 · MLA: DeepSeek-V2, 2405.04434; DeepSeek-V3, 2412.19437 · Llama 3: 2407.21783 · Qwen3: 2505.09388 ·
# SmolLM2: 2502.02737. Sizes of published models: `course_lib/zoo/configs.py`, each row with how it was read. Devices: NVIDIA's data sheets of H100 and H200, Ada whitepaper.
#
# **Next:** module 10 works on the factor that is left, the number of tokens that are kept.
