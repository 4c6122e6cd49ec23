# %% [markdown] id="title" slideshow={"slide_type": "slide"}
# # 05 · Position: from counting to rotation
#
# *Attention compares what tokens say. It does not see where they stand. This notebook adds the
# missing piece, from counting to the rotation that most open models use, and breaks it in the ways
# that real code has broken it.*
#
# | | |
# |---|---|
# | **You need** | Module 04: queries, keys and values, scores, softmax, the causal mask. Sine and cosine. |
# | **You will learn** | to say exactly what attention without positions can and cannot tell apart; to prove that sinusoids turn an offset into a matrix; to derive RoPE, write it in both layouts, and prove what its scores depend on; to read the position fields of a published config and predict its wavelengths; to recognise the classic bugs (layout, offset, precision) by what they do |
# | **Time** | 90 minutes to read and run, 40 for the two exercises |

# %% [markdown] id="title-notes" slideshow={"slide_type": "notes"}
# **2 minutes.** Ask the room: "The dog bites the man" and "The man bites the dog" have the same
# words. Where, in the formulas of module 04, is the difference? Collect answers, take no side yet.

# %% id="setup" slideshow={"slide_type": "skip"}
import math

import torch

torch.set_num_threads(1)
torch.set_printoptions(precision=4, sci_mode=False, linewidth=100)

from course_lib import NTK, ALiBi, Config, Interpolation, Llama3, ModernDecoder, Rope, YaRN
from course_lib.model import (
    alibi_bias,
    apply_rope,
    causal_mask,
    document_mask,
    half_split_order,
    inverse_frequencies,
    scaled_frequencies,
)
from course_lib.serving import left_pad, new_caches
from course_lib.teaching import check
from course_lib.teaching.explorables import rope as explorables
from course_lib.teaching.lessons import rope as lesson
from course_lib.teaching.lessons import rope_figures as draw
from course_lib.teaching.theme import ROLE, figure, save, show
from course_lib.teaching.wrong import NormAfterRope, PositionsRestart, RopeOnV, with_mistakes

# %% [markdown] id="first-figure-text" slideshow={"slide_type": "slide"}
# ## The picture to keep
#
# **Every hand has moved. No angle between two hands has.**

# %% id="first-figure"
speeds = inverse_frequencies(
    10, 100.0
)  # radians a token, five pairs; theta is 100 to see them move
fig, axes = figure(10.5, 4.9, nrows=2)
for ax, key in zip(axes, (5, 45), strict=True):
    query = key + 3
    faces = [(f"{w:.2f} rad a token", query * w, key * w) for w in speeds.tolist()]
    draw.draw_clocks(ax, faces)
    draw.titled(ax, f"query at position {query}, key at position {key}")
save(fig, "05_clocks")
show(
    fig,
    alt="Two rows of five clock faces, query hand blue, key hand orange. All hands differ between "
    "the rows, the five angles between the hands are the same.",
    summary="angles between the hands: "
    + ", ".join(f"{math.remainder(3 * w, 2 * math.pi):.2f}" for w in speeds.tolist()),
)

# %% [markdown] id="first-figure-after" slideshow={"slide_type": "skip"}
# This is rotary position embedding, RoPE. It cuts a query and a key into pairs of channels and
# reads each pair as the hand of a clock. The later a token stands in the text, the further its
# hands have turned, and each pair has its own speed. The blue hands belong to a query, the orange
# ones to a key three tokens before it; in the second row both stand 40 positions later.
#
# A score is made of the angles between the hands. So it knows how far apart two tokens are, and
# not where they are.

# %% [markdown] id="first-figure-notes" slideshow={"slide_type": "notes"}
# **3 minutes.** Leave it on the screen until somebody says "so it does not know the position".
# Right: it knows differences. The rest of the lecture is where that picture comes from, and what
# goes wrong with it.

# %% [markdown] id="blind-text" slideshow={"slide_type": "slide"}
# ## 1 · What attention cannot see
#
# Four tokens, three channels, one head, no mask. We shuffle the tokens and compare.

# %% id="blind-build" tags=["output-only"]
torch.manual_seed(0)
X = torch.randn(4, 3, dtype=torch.float64)
W_q, W_k, W_v = torch.randn(3, 3, 3, dtype=torch.float64)


def attend(x, allowed=None):
    scores = (x @ W_q) @ (x @ W_k).T / math.sqrt(x.shape[-1])
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1) @ (x @ W_v)


order = torch.tensor([2, 0, 3, 1])
print("same output, row for row:     ", torch.allclose(attend(X[order]), attend(X)))
print("same rows, in the new order:  ", torch.allclose(attend(X[order]), attend(X)[order]))
print("equal after averaging tokens: ", torch.allclose(attend(X[order]).mean(0), attend(X).mean(0)))

# %% [markdown] id="blind-proof"
# The output is **not** the same: it is shuffled as the input was. Attention is *equivariant*, not
# invariant. A token's own result does not change when others trade places, and only something that
# forgets rows, such as an average over tokens, makes two orders the same.
#
# The proof takes one line a step. Write the shuffle as a matrix $P$, so that the new input is
# $PX$.
#
# $$(PXW_Q)(PXW_K)^\top = P\,(QK^\top)\,P^\top,\qquad \mathrm{softmax}(PSP^\top)=P\,\mathrm{softmax}(S)\,P^\top,\qquad P\,A\,P^\top PV = P\,(AV).$$
#
# The middle step holds because softmax works on each row alone and does not care in which order
# the entries stand; the last because $P^\top P = I$. Let us check each step, with $P$ itself.

# %% id="blind-steps" tags=["output-only"]
P = torch.eye(4, dtype=torch.float64)[order]
S = (X @ W_q) @ (X @ W_k).T
print("P X is X in the new order:   ", torch.equal(P @ X, X[order]))
shuffled = (P @ X @ W_q) @ (P @ X @ W_k).T
print("scores are P S P^T:          ", torch.allclose(shuffled, P @ S @ P.T))
moved = P @ S.softmax(-1) @ P.T
print("softmax commutes with P:     ", torch.allclose((P @ S @ P.T).softmax(-1), moved))
causal = causal_mask(4)
gap = (attend(X[order], causal) - attend(X, causal)[order]).abs().max()
print(f"with a causal mask the shuffled output differs by {gap:.3f}")

# %% [markdown] id="blind-causal" slideshow={"slide_type": "skip"}
# A **causal mask breaks the symmetry**: a token that moves to the front sees fewer others. So a
# decoder without any positions is not blind to order; how much it can learn from the mask alone is
# the subject of section 11.

# %% [markdown] id="blind-turn" slideshow={"slide_type": "skip"}
# **Turn it.** Type your own sentence, choose an order, then add the mask or the positions of
# section 2. Which words change?

# %% id="blind-explorable" slideshow={"slide_type": "skip"}
explorables.permutation_explorable()

# %% [markdown] id="blind-notes" slideshow={"slide_type": "notes"}
# **6 minutes.** Set the order to "backwards": the rows of the right panel are those of the left
# one, upside down, and all bars are zero. Then the causal mask, then the positions. Correct
# whoever says "attention treats text as a bag of words, so both sentences give the same output":
# each *word* gets the same output.

# %% [markdown] id="count-text" slideshow={"slide_type": "slide"}
# ## 2 · Writing the position down
#
# The plain idea is to add something to each token that depends on its position. Five attempts, and what each lacks:

# %% id="count-ladder"
attempts = [
    ("count\n0, 1, 2, ...", "a product of two\ncounts is no distance"),
    ("divide by\nthe length", "the same place gets\ntwo codes"),
    ("one sine", "far positions\ncome very near"),
    ("sine and\ncosine", "near again, after\nmore turns"),
    ("many pairs,\nmany speeds", "distinct, bounded,\nand shifts are matrices"),
]
fig, ax = figure(11, 2.3)
draw.draw_attempts(ax, attempts)
save(fig, "05_attempts")
show(
    fig,
    alt="A chain of five boxes: count, divide by length, one sine, sine and cosine, many pairs. "
    "Below each stands what it lacks.",
    summary=f"{len(attempts)} attempts",
)

# %% [markdown] id="count-index-text" slideshow={"slide_type": "skip"}
# **Counting.** Nothing forbids it. A large input number only makes training harder to condition; a
# network may well learn from an index, just as it learns from an index into a table. And two
# counts do hold their distance: subtract them. But attention does not subtract, it *multiplies*:

# %% id="count-index" slideshow={"slide_type": "skip"}
for n, m in ((5, 3), (12, 10), (103, 101)):
    print(f"positions {n:3} and {m:3}: difference {n - m}, product {n * m:6,}")
print("position 2 of 2 as a share of the length:", 2 / 2, "| position 2 of 4:", 2 / 4)

# %% [markdown] id="count-index-after" slideshow={"slide_type": "skip"}
# The product says nothing about the distance. **Dividing by the length** keeps numbers small and
# is worse: position 2 is `1.0` in a text of two tokens and `0.5` in one of four, so a code means
# another place in each text.
#
# **One sine** is bounded and needs no length. No two whole positions get exactly the same sine,
# since no multiple of $\pi$ is a whole number. But positions come *arbitrarily near*, and a model
# that computes with a few digits cannot tell them apart.

# %% [markdown] id="count-near-text"
# Which two of the first thousand positions does each code confuse most?

# %% id="count-near" tags=["output-only"]
positions = torch.arange(1001)
i, j, gap = lesson.closest_pair(positions.double().sin().unsqueeze(1))
print(f"one sine:                positions {i} and {j} differ by {gap:.2e}")
for d in (2, 8, 16, 64):
    i, j, gap = lesson.closest_pair(lesson.sinusoid(positions, d))
    name = "one sine-cosine pair" if d == 2 else f"{d // 2} pairs (d={d})"
    print(f"{name + ':':24} positions {i} and {j} lie {gap:.3g} apart")

# %% [markdown] id="count-near-after" slideshow={"slide_type": "skip"}
# One sine confuses 11 with `344`; a sine with its cosine names the angle fully and still comes
# back to almost the same angle: $710$ tokens are very nearly $113$ full turns, so `15` and `725`
# are neighbours. With **many pairs at different speeds** the worst two of a thousand positions are
# far apart, and the more channels, the farther.
#
# That is the code of the first Transformer. Pair $i$ of $d/2$ has its own frequency:
#
# $$\mathrm{PE}(p, 2i)=\sin(p\,\omega_i),\qquad \mathrm{PE}(p, 2i+1)=\cos(p\,\omega_i),\qquad \omega_i=\mathrm{base}^{-2i/d}.$$


# %% id="count-sinusoid" slideshow={"slide_type": "skip"}
def codes(positions, d, base=10000.0):
    pair = torch.arange(d // 2, dtype=torch.float64)
    speed = base ** (-2 * pair / d)  # (d/2,) radians a token
    angle = positions.double()[:, None] * speed  # (T, d/2)
    return torch.stack((angle.sin(), angle.cos()), dim=2).flatten(1)  # (T, d)


speed = inverse_frequencies(6, 10000.0)
print("d=6, tokens for one radian:", [round(x, 2) for x in (1 / speed).tolist()])
print("     tokens for one turn:  ", [round(x, 1) for x in (2 * math.pi / speed).tolist()])
print(f"     each pair's speed over the one before: {speed[1] / speed[0]:.4f}")
print(codes(torch.arange(4), 6).float())
theirs = lesson.sinusoid(torch.arange(4), 6)
print("equal to the code used in the explorables:", torch.equal(codes(torch.arange(4), 6), theirs))

# %% [markdown] id="count-clocks" slideshow={"slide_type": "skip"}
# Read it as a set of clocks, from one that turns in `6.3` tokens to one that needs `2916.4`. It is
# *not* binary counting: in a binary counter each digit is half as fast as the one before and
# flips; here each pair is `0.0464` times as fast ($\mathrm{base}^{-2/d}$, so another number for
# another width) and moves smoothly. All they share is many timescales.
#
# Two more choices stand at the input.
#
# - **Add or concatenate?** Concatenating keeps word and position apart but makes the stream twice as
#   wide, and a square projection four times as large. Adding keeps the width.
# - **A formula or a table?** A table of learned vectors, a row a position, works as well (the first
#   Transformer's authors found no difference), but its rows end: GPT-2's table has `1,024` of them, and a text one token
#   longer has no code for it.

# %% id="count-cost" slideshow={"slide_type": "skip"}
d = 512
print(f"adding:        d={d}, a d x d projection has {d * d:,} weights")
print(f"concatenating: width {2 * d:,}, it has {(2 * d) ** 2:,}")
print(f"               if only its input is doubled: {2 * d * d:,}")

# %% [markdown] id="count-turn" slideshow={"slide_type": "skip"}
# **Turn it.** What does a smaller base do to the stripes? And which positions look alike to
# position 40, by the product below?

# %% id="count-explorable" slideshow={"slide_type": "skip"}
explorables.sinusoid_explorable()

# %% [markdown] id="count-notes" slideshow={"slide_type": "notes"}
# **7 minutes.** The ladder is the story of the lecture in one line; come back to it when RoPE
# keeps the last rung and changes only *where* it is used. Set base to 10: the slow pairs become
# fast and the product gets side peaks as high as the main one.

# %% [markdown] id="shift-text" slideshow={"slide_type": "slide"}
# ## 3 · A shift is a matrix
#
# Why sine *and* cosine? Because of what a step of $k$ tokens then is. The addition theorems say
#
# $$\begin{pmatrix}\sin\omega(p+k)\\ \cos\omega(p+k)\end{pmatrix}=\begin{pmatrix}\cos\omega k & \sin\omega k\\ -\sin\omega k & \cos\omega k\end{pmatrix}\begin{pmatrix}\sin\omega p\\ \cos\omega p\end{pmatrix}.$$
#
# The matrix holds $k$ and not $p$: **one** matrix $M_k$ moves every position by $k$. The sine's
# new value needs the old cosine, so with sines alone there is no such matrix, and we can measure
# that.


# %% id="shift-matrix" tags=["output-only"]
def shift_matrix(k, d, base=10000.0):
    M = torch.zeros(d, d, dtype=torch.float64)
    for i, w in enumerate(inverse_frequencies(d, base).tolist()):
        c, s = math.cos(w * k), math.sin(w * k)
        M[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = torch.tensor([[c, s], [-s, c]], dtype=M.dtype)
    return M


code, M10 = codes(torch.arange(200), 16), shift_matrix(10, 16)
for p in (5, 30):
    error = (M10 @ code[p] - code[p + 10]).abs().max()
    print(f"M_10 maps {p} to {p + 10} (< 1e-12):", bool(error < 1e-12))
now, later, errors = code[:-10], code[10:], {}
for name, channels in (("sine and cosine", slice(None)), ("sines alone", slice(0, None, 2))):
    best = torch.linalg.lstsq(now[:, channels], later[:, channels]).solution
    errors[name] = (now[:, channels] @ best - later[:, channels]).abs().amax(1)
    worst = errors[name].max()
    print(f"best matrix for {name}: worst error {'< 1e-9' if worst < 1e-9 else f'{worst:.3f}'}")

# %% id="shift-figure"
fig, (left, right) = figure(11, 2.15, ncols=2, width_ratios=(1, 3))
draw.draw_matrix(left, M10)
draw.titled(left, "M_10: 8 rotations", xlabel="16 channels of p", ylabel="of p + 10")
for (name, error), role in zip(errors.items(), ("scores", "k"), strict=True):
    right.plot(error, color=ROLE[role], label=name)
labels = dict(xlabel="position p", ylabel="error at p + 10", xlim=(0, 189), ylim=(-0.05, 1.5))
draw.titled(right, "The best matrix that moves all positions by 10", **labels)
show(
    fig,
    alt="Left: a matrix of eight blocks of two by two. Right: the error of the best matrix by "
    "position, none for sine and cosine, large everywhere for sines alone.",
    summary=", ".join(f"{name}: mean error {e.mean():.3f}" for name, e in errors.items()),
)

# %% [markdown] id="shift-product" slideshow={"slide_type": "skip"}
# A second gift: the *product* of two codes depends on their distance alone,
# $\mathrm{PE}(p)\cdot\mathrm{PE}(p+k)=\sum_i\cos\omega_i k$. If a score were this product, we
# would be done. But the codes are *added to the words* and pass through $W_Q$ and $W_K$ first, and
# then the property is gone:

# %% id="shift-lost" slideshow={"slide_type": "skip"}
torch.manual_seed(1)
A, B = torch.randn(2, 16, 16, dtype=torch.float64) / 4  # as W_Q and W_K would be
for p in (5, 30, 100):
    plain, projected = code[p + 10] @ code[p], (code[p + 10] @ A) @ (code[p] @ B)
    print(
        f"positions {p + 10:3} and {p:3}: product {plain:.4f}, after projections {projected:+.4f}"
    )

# %% [markdown] id="shift-lost-after" slideshow={"slide_type": "skip"}
# A score of (word + code) with (word + code) has four terms: word with word, word with code, code
# with word, code with code. Two of them mix content with an absolute place, and even the last one
# depends on the distance only if training happens to make $W_QW_K^\top$ do so. RoPE repairs this
# by moving the rotation to *after* the projections.

# %% [markdown] id="shift-notes" slideshow={"slide_type": "notes"}
# **5 minutes.** The least-squares line is the proof that the cosine is not decoration. Ask what
# M_10 times M_10 is before going on (M_20: rotations add their angles). That is all of RoPE.

# %% [markdown] id="turn-text" slideshow={"slide_type": "slide"}
# ## 4 · From adding to turning
#
# Take one pair of channels of a query at position $n$ and of a key at position $m$. Instead of
# adding a code, **rotate the pair** by position times frequency:
#
# $$R(a)=\begin{pmatrix}\cos a&-\sin a\\ \sin a&\cos a\end{pmatrix},\qquad \big(R(n\omega)\,q\big)^\top\big(R(m\omega)\,k\big)=q^\top R(n\omega)^\top R(m\omega)\,k=q^\top R\big((m-n)\,\omega\big)\,k.$$
#
# A rotation transposed is the rotation back, and rotations add their angles. So $n$ and $m$ leave
# the score except through their difference. Nothing was learned and nothing approximated.


# %% id="turn-pair" tags=["output-only"]
def R(angle):
    return torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])


print("R(3)^T R(5) is R(2):", torch.allclose(R(3.0).T @ R(5.0), R(2.0), atol=1e-6))
q, k = torch.tensor([1.0, 0.5]), torch.tensor([0.3, -1.0])
for n, m in ((3, 5), (10, 12), (101, 103)):
    print(f"query at {n:3}, key at {m:3}: score {(R(n) @ q) @ (R(m) @ k):.4f}")

# %% id="turn-pair-figure"
fig, axes = figure(11, 1.9, ncols=3)
for ax, (n, m) in zip(axes, ((3, 5), (10, 12), (101, 103)), strict=True):
    draw.draw_vectors(ax, R(n) @ q, R(m) @ k)
    draw.titled(ax, f"query at {n}, key at {m}")
apart = math.remainder(math.atan2(*q.flip(0)) - 2 - math.atan2(*k.flip(0)), 2 * math.pi)
show(
    fig,
    alt="Three circles with a query and a key as arrows. Both turn from circle to circle, and the "
    "angle between them stays.",
    summary=f"angle between query and key: {abs(apart):.2f} rad in each",
)

# %% [markdown] id="turn-head-text" slideshow={"slide_type": "skip"}
# Now a whole head. It has $d_h$ channels, so $d_h/2$ pairs, and pair $i$ gets frequency
# $\omega_i=\theta^{-2i/d_h}$: the last rung of the ladder, unchanged. The base is now called
# $\theta$, `rope_theta` in a config; beware of papers that write $\theta_i$ for the frequencies.
# First the angles, one for each token and pair:

# %% id="turn-angles" slideshow={"slide_type": "skip"}
T, d_h, theta = 6, 8, 10000.0
freq = theta ** (-torch.arange(0, d_h, 2) / d_h)  # (d_h/2,) radians a token
angle = torch.arange(T)[:, None] * freq  # (T, d_h/2)
cos, sin = angle.cos(), angle.sin()
print("freq", tuple(freq.shape), freq)
print("angle", tuple(angle.shape), "cos", tuple(cos.shape))

# %% [markdown] id="turn-pairs-text" slideshow={"slide_type": "skip"}
# Which two channels make a pair? Here channel $i$ and channel $i+d_h/2$: the head is cut in two
# halves, $a$ and $b$. (Section 5 has the other custom.) Then the rotation is two lines:

# %% id="turn-head" slideshow={"slide_type": "skip"}
torch.manual_seed(0)
x = torch.randn(2, 3, T, d_h)  # (B, H, T, d_h), queries or keys
a, b = x.chunk(2, dim=-1)  # (B, H, T, d_h/2) each
turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
print("turned", tuple(turned.shape))
print("equal to course_lib.model.apply_rope:", torch.equal(turned, apply_rope(x, cos, sin)))
print("position 0 is left alone:            ", torch.equal(turned[..., 0, :], x[..., 0, :]))
print("lengths are kept:                    ", torch.allclose(turned.norm(dim=-1), x.norm(dim=-1)))
parameters = sum(p.numel() for p in ModernDecoder(Config()).rope.parameters())
print("parameters:                          ", parameters)

# %% [markdown] id="turn-scores-text" slideshow={"slide_type": "skip"}
# **The one number to keep.** A fixed query and key of eight channels, moved through the text at a
# constant distance, in double precision:

# %% id="turn-scores" slideshow={"slide_type": "skip"}
draw_seed = torch.Generator().manual_seed(5)
fixed_q, fixed_k = torch.randn(2, 8, generator=draw_seed, dtype=torch.float64)


def score(n, m, dtype=torch.float64):
    angles = torch.tensor([n, m], dtype=dtype)[:, None] * inverse_frequencies(8, 10000.0).to(dtype)
    pair = apply_rope(torch.stack((fixed_q, fixed_k)).to(dtype), angles.cos(), angles.sin())
    return (pair[0] @ pair[1]).item()


for n, m in ((3, 5), (10, 12), (101, 103)):
    equal = abs(score(n, m) - score(3, 5)) < 1e-12
    print(f"query at {n:3}, key at {m:3}: {score(n, m):.10f}   equal to 1e-12: {equal}")
print(f"query at   5, key at   3: {score(5, 3):.10f}   (the order matters)")

# %% [markdown] id="turn-where" slideshow={"slide_type": "slide"}
# ### Where it happens
#
# Sinusoids enter once, at the bottom, and each layer finds what is left of them. RoPE enters **in
# every layer**, between the projections and the scores, and touches queries and keys only.

# %% id="turn-where-figure"
fig, ax = figure(11, 4.0)
draw.draw_two_places(ax)
save(fig, "05_two_places")
show(
    fig,
    alt="Left: embedding and sinusoids are added once and flow into the blocks. Right: queries and "
    "keys are turned by positions in every block, values are not.",
    summary="added once at the input | queries and keys turned in every layer",
)

# %% [markdown] id="turn-value-text" slideshow={"slide_type": "skip"}
# Why not the values? A score only needs angles *between* hands. A value is summed up and used as
# it is, so a turned value would carry its absolute position into the token's vector. Let us do it
# wrong on purpose: the same random decoder, once as it is, once with turned values, each reading
# the same tokens at the start of a text and a hundred positions later.

# %% id="turn-value" slideshow={"slide_type": "skip"}
torch.manual_seed(0)
decoder = ModernDecoder(Config()).eval()
ids = torch.randint(decoder.cfg.vocab_size, (2, 16))
with torch.no_grad():
    right = decoder(ids)[0]
    wrong = with_mistakes(decoder, RopeOnV)
    for name, model in (("as it is", decoder), ("values turned too", wrong)):
        here, there = model(ids)[0], model(ids, pos_offset=100)[0]
        moved, change = (there - here).abs().max(), (here - right).abs().max()
        moved = "< 1e-4" if moved < 1e-4 else f"{moved:.2f}"
        print(
            f"{name:18} changes by {moved} when all positions grow by 100; "
            f"from the right logits by {change:.2f}"
        )

# %% [markdown] id="turn-fixed-text" slideshow={"slide_type": "skip"}
# ### For fixed content
#
# "RoPE's scores depend only on distance" needs three more words: **for fixed $q$ and $k$**. In a
# model, queries and keys are made from each token's vector, and from the second layer on that
# vector has taken in what came before. Below, the same two words stand four tokens apart at two
# places of a text:

# %% id="turn-fixed" slideshow={"slide_type": "skip"}
from course_lib.trace import trace

text = torch.randint(1000, (1, 24), generator=torch.Generator().manual_seed(2))
text[0, [3, 15]], text[0, [7, 19]] = 11, 22  # word 11 at 3 and 15, word 22 four tokens later
run = trace(decoder, text, flops=False)
for layer in range(4):
    scores = run[f"blocks.{layer}.attn.scores"].value[0, 0]
    print(
        f"layer {layer}: score of 22 at 7 for 11 at 3: {scores[7, 3]:+.3f}, "
        f"of 22 at 19 for 11 at 15: {scores[19, 15]:+.3f}"
    )

# %% [markdown] id="turn-fixed-after" slideshow={"slide_type": "skip"}
# In layer 0 the two scores are equal, because there a query is nothing but its word. From layer 1
# on they differ: not because RoPE fails, but because the two places have different pasts.

# %% [markdown] id="turn-turn" slideshow={"slide_type": "slide"}
# ### Turn it
#
# Move the query alone, then both together. Which bars answer to one more token, which only to
# hundreds?

# %% id="turn-explorable"
explorables.clock_explorable()

# %% [markdown] id="turn-notes" slideshow={"slide_type": "notes"}
# **10 minutes**, the heart of the lecture. Write R(n)^T R(m) = R(m - n) on the board and have
# someone say why. In the explorable set both sliders to the same value: all cosines 1. Then theta
# to the far right: the slow pairs stop moving, and only the first few still tell neighbours apart.

# %% [markdown] id="turn-exercise-text" slideshow={"slide_type": "skip"}
# **Your turn.** Write the rotation yourself: any positions, any base, and only the first
# `d_rotated` channels (section 9 needs that). Until you have, the library's version is used, and
# the check names the mistake if it knows it.


# %% id="exercise-rotate" tags=["exercise:rotate_heads"] slideshow={"slide_type": "skip"}
def my_rope(x, positions, theta, d_rotated):
    """x (B, H, T, h) turned by positions (T,); channels from d_rotated on pass unchanged."""
    # 1. Frequencies theta^(-2i / d_rotated), one for each of the d_rotated / 2 pairs.
    # 2. Angles (T, d_rotated / 2): position times frequency, in float32 whatever x is.
    # 3. Pair i is channels i and i + d_rotated / 2: (a cos - b sin, b cos + a sin).
    # 4. Put the pairs and the untouched channels together again, in the dtype of x.
    ...


my_rope = check("rotate_heads", my_rope).use

# %% [markdown] id="layout-text" slideshow={"slide_type": "slide"}
# ## 5 · Two layouts, one rotation
#
# Two customs say which channels make a pair. *Half-split*: channel $i$ with $i+d_h/2$, as in the
# weights on Hugging Face. *Interleaved*: channel $2i$ with $2i+1$, as in the paper and in Meta's
# own Llama files. Both keep lengths and both make scores depend on distance, so only plain values
# can tell them apart.

# %% id="layout-literal" tags=["output-only"]
x = torch.arange(1.0, 9.0).view(1, 8)
angle = torch.tensor([[3.0]]) * inverse_frequencies(8, 10000.0).float()  # position 3
half = apply_rope(x, angle.cos(), angle.sin(), "half")
inter = apply_rope(x, angle.cos(), angle.sin(), "interleaved")
print("half-split  ", [round(v, 4) for v in half[0].tolist()])
print("interleaved ", [round(v, 4) for v in inter[0].tolist()])
print(f"length of each: {half.norm():.4f}, {inter.norm():.4f}, before: {x.norm():.4f}")

# %% [markdown] id="layout-order-text" slideshow={"slide_type": "skip"}
# They are the same rotation in another order of channels: first the even ones, then the odd ones.
# So if the *weights* that make queries and keys are reordered head by head, either layout gives
# the scores of the other.

# %% id="layout-order" slideshow={"slide_type": "skip"}
evens_then_odds = half_split_order(8)
print("order of channels:", evens_then_odds.tolist())
again = apply_rope(x[:, evens_then_odds], angle.cos(), angle.sin(), "half")
print("the same after reordering:", torch.equal(again, inter[:, evens_then_odds]))
print(f"before it, the two differ by up to {(half - inter).abs().max():.2f}")


def scores(q_layout, k_layout, n=7, m=4):
    angle = torch.tensor([[n], [m]]) * inverse_frequencies(8, 10000.0)  # (2, 4)
    turned_q = apply_rope(fixed_q[None], angle[:1].cos(), angle[:1].sin(), q_layout)
    turned_k = apply_rope(fixed_k[None], angle[1:].cos(), angle[1:].sin(), k_layout)
    return (turned_q @ turned_k.T).item()


for layouts in (("half", "half"), ("interleaved", "interleaved"), ("half", "interleaved")):
    print(f"query {layouts[0]:11}  key {layouts[1]:11}  score {scores(*layouts):+.3f}")
moved = scores("half", "interleaved", 107, 104) - scores("half", "interleaved")
print(f"mixed, both 100 later: the score changes by {moved:+.3f}")

# %% [markdown] id="layout-after"
# **Weights are not interchangeable.** Loaded into the wrong layout, a model runs, keeps every
# length and every property of this section, and has forgotten what it learned (section 14 measures
# how much). Mixed layouts are worse: the score no longer depends on the distance alone. It happens
# to the best: the demonstration code of DeepSeek-V3.2 turned its indexer's queries and keys in the
# interleaved layout where the other one was needed, until a correction in November 2025.

# %% [markdown] id="layout-notes" slideshow={"slide_type": "notes"}
# **4 minutes.** Ask how one would notice. Shapes: no. Norms: no. Cached equals uncached: yes, it
# is equal. Only known values, or a known model's loss. That is why this course tests literal
# numbers.

# %% [markdown] id="wave-text" slideshow={"slide_type": "slide"}
# ## 6 · A score is not a measure of distance
#
# One often reads that RoPE's scores decay with distance. Take one pair with $q=k$ of length 1: its
# score is $\cos(n-m)$, and a cosine comes back.

# %% id="wave-one" slideshow={"slide_type": "skip"}
print("distance 0 to 7:", [round(math.cos(n), 4) for n in range(8)])
print("rises from distance 3 to 6:", math.cos(3) < math.cos(4) < math.cos(5) < math.cos(6))

# %% [markdown] id="wave-mean-text" slideshow={"slide_type": "skip"}
# With many pairs the waves overlap. Let $q=k$ with equal weight on all 64 pairs of a head, which
# is the case most in favour of a decay: every pair starts at its peak.

# %% id="wave-mean" slideshow={"slide_type": "skip"}
freq = inverse_frequencies(128, 10000.0)
distance = torch.arange(4097, dtype=torch.float64)
mean = (distance[:, None] * freq).cos().mean(1)
for n in (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
    print(f"distance {n:5,}: {mean[n]:6.2f}")
rises = int((mean[1:513] > mean[:512]).sum())
print(f"of the first 512 steps away, {rises} raise the score")

# %% [markdown] id="wave-mean-after" slideshow={"slide_type": "skip"}
# On average it falls, and even here nearly half of the steps go *up*: `240` of `512`. The fall
# comes from an assumption, that all pairs agree at distance 0. A trained head chooses its own
# amplitudes and phases, one for each pair, and can look at any distance it likes; section 14 shows
# one that looks exactly one token back.

# %% id="wave-figure"
n, g = distance[:129], torch.Generator().manual_seed(1)
phase = 2 * math.pi * torch.rand(64, generator=g, dtype=torch.float64)
curves = {
    "one pair": (n.cos(), "stream"),
    "64 pairs in step": (mean[:129], "scores"),
    "64 pairs, random phases": ((n[:, None] * freq + phase).cos().mean(1), "k"),
}
fig, ax = figure(10.5, 3.8)
for (name, (y, role)), style in zip(curves.items(), (":", "-", "--"), strict=True):
    ax.plot(n, y, style, color=ROLE[role], label=name)
ax.axhline(0, color="#9aa1ab", linewidth=0.8)
draw.titled(
    ax,
    "Decay is a property of the content, not of RoPE",
    xlabel="distance n - m (tokens)",
    ylabel="score over its largest",
    xlim=(0, 128),
    ylim=(-1.1, 1.75),
)
at_128 = ", ".join(f"{name} {y[128]:.2f}" for name, (y, role) in curves.items())
show(
    fig,
    alt="Three curves over distance: a cosine, a wavy falling curve, and one that wanders about 0.",
    summary=f"at distance 128: {at_128}",
)

# %% [markdown] id="wave-turn" slideshow={"slide_type": "skip"}
# **Turn it.** Orange marks where a token farther away scores higher. Can you find a head for which
# nothing is orange?

# %% id="wave-explorable" slideshow={"slide_type": "skip"}
explorables.score_explorable()

# %% [markdown] id="wave-notes" slideshow={"slide_type": "notes"}
# **4 minutes.** Draw seeds with "random": some curves *rise* from distance 0. Let the class find
# the sentence that is true: "for q = k, the mean over pairs falls on average".

# %% [markdown] id="length-text" slideshow={"slide_type": "slide"}
# ## 7 · Wavelengths: what theta decides
#
# Pair $i$ needs $\lambda_i=2\pi\,\theta^{2i/d_h}$ tokens for a full turn. The first always needs
# `6.3`. The last depends on theta, and theta on nothing but a choice:

# %% id="length-table" slideshow={"slide_type": "skip"}
print("       longest turn in tokens    of 64 pairs (d_h=128), not")
print("     theta      d_h=64      d_h=128   one turn in 4,096 tokens")
for theta in (1e4, 5e5, 1e6, 1e7):
    longest = [2 * math.pi / inverse_frequencies(d, theta)[-1].item() for d in (64, 128)]
    unfinished = int((inverse_frequencies(128, theta) * 4096 < 2 * math.pi).sum())
    print(f"{theta:10,.0f}  {longest[0]:10,.0f}   {longest[1]:10,.0f}   {unfinished:8}")

# %% [markdown] id="length-after" slideshow={"slide_type": "skip"}
# A pair that never finishes a turn within the text is a hand whose angle alone tells early from
# late: no two distances turn it to the same angle. A pair that turns many times tells neighbours apart
# and repeats itself. A larger theta trades the second kind for the first: from theta ten thousand
# to a million, the pairs that stay below one turn in `4,096` tokens go from `18` to `33`.
#
# **Theta decides wavelengths, not ability.** A model trained on `4,096` tokens has never seen the
# angles that lie beyond, whatever its theta is.

# %% id="length-figure"
fig, ax = figure(10.5, 4.0)
for theta, role in ((1e4, "q"), (5e5, "k"), (1e6, "v"), (1e7, "scores")):
    waves = 2 * math.pi / inverse_frequencies(128, theta)
    ax.plot(waves, color=ROLE[role])
    ax.text(63.6, waves[-1], f"theta {theta:,.0f}", color=ROLE[role], va="center")
ax.axhline(4096, color="#1f2328", linestyle="--", linewidth=1.2)
ax.text(0.5, 5500, "a text of 4,096 tokens")
labels = dict(xlabel="pair, fast to slow", ylabel="tokens a turn", xlim=(0, 75), yscale="log")
draw.titled(ax, "Same start, other ends: the ladders of a head of 128", **labels)
save(fig, "05_wavelengths")
show(
    fig,
    alt="Four straight lines on a logarithmic axis, all starting at 6.3 tokens; the larger theta, "
    "the steeper; a dashed line marks 4,096 tokens.",
    summary=f"all start at {waves[0]:.1f} tokens; theta 10,000,000 ends at {waves[-1]:,.0f}",
)

# %% [markdown] id="length-notes" slideshow={"slide_type": "notes"}
# **4 minutes.** The dashed line is the length that training has seen. Ask what the hands above it
# have learned: only the first part of their dial. This is the whole problem of the next section.

# %% [markdown] id="stretch-text" slideshow={"slide_type": "slide"}
# ## 8 · Stretching the context
#
# A model was trained on texts of $L_0$ tokens and shall read texts $s$ times as long. Its slow
# hands would reach angles that it has never seen. Four rules, each a change of the frequencies
# alone:
#
# | rule | frequency of pair $i$ | idea |
# |---|---|---|
# | position interpolation | $\omega_i/s$ | squeeze all positions into the old range |
# | NTK-aware | a larger base, $\theta\,s^{d/(d-2)}$ | the fastest keeps its speed, the slowest is divided by $s$ |
# | YaRN | kept where the pair turns more than $\beta_{fast}$ times in $L_0$, divided by $s$ where less than $\beta_{slow}$, a ramp between | keep what tells neighbours apart |
# | Llama 3 | the same idea, the mix linear in turns, between 1 and 4 | |
#
# A model that is trained on long texts from the start needs none of this: its theta is chosen
# larger.

# %% [markdown] id="stretch-figure-text" slideshow={"slide_type": "slide"}
# ### What the four rules do to each pair
#
# A head of `128` channels, theta `500,000`, stretched by 8. At 1 a pair keeps its speed.

# %% id="stretch-figure"
d, theta, factor, length = 128, 5e5, 8.0, 8192
plain = inverse_frequencies(d, theta)
rules = {
    "interpolation": (Interpolation(factor), "k", "--"),
    "NTK": (NTK(factor), "v", "-."),
    "YaRN": (YaRN(factor, length), "q", "-"),
    "Llama 3": (Llama3(factor, original_length=length), "scores", ":"),
}
fig, ax = figure(10.5, 3.8)
ends = {}
for name, (rule, role, style) in rules.items():
    slowed = plain / scaled_frequencies(Rope(scaling=rule), d, theta)
    ax.plot(slowed, style, color=ROLE[role], label=name)
    ends[name] = f"{name} {slowed[0]:.0f} to {slowed[-1]:.0f}"
title = "Interpolation slows all pairs; the others leave the fast ones alone"
draw.titled(ax, title, xlabel="pair, fast to slow", ylabel="slowed down by", yticks=[1, 2, 4, 8])
save(fig, "05_scalings")
alt = "Interpolation is flat at 8; NTK rises from 1 to 8; YaRN and Llama 3 stay at 1, then reach 8."
show(fig, alt=alt, summary="fastest to slowest pair slowed by: " + ", ".join(ends.values()))

# %% [markdown] id="stretch-yarn-text" slideshow={"slide_type": "skip"}
# ### YaRN, a step at a time
#
# How often does a pair turn within the trained length? $r_i=L_0\,\omega_i/2\pi$. Pairs above `32`
# turns are kept, pairs below one are divided by the factor, and a straight ramp over the pair's
# index joins them.

# %% id="stretch-yarn" slideshow={"slide_type": "skip"}
d, theta, factor, length = 64, 10000.0, 4.0, 2048
freq = inverse_frequencies(d, theta)


def pair_that_turns(turns):  # solve length * theta^(-2i/d) / (2 pi) = turns for i
    return d * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))


low, high = pair_that_turns(32), pair_that_turns(1)
first, last = math.floor(low), math.ceil(high)
print(f"the ramp runs from pair {low:.6f} to {high:.6f}, rounded outwards {first} to {last}")
ramp = ((torch.arange(d // 2) - first) / (last - first)).clamp(0, 1)
mine = freq * (1 - ramp) + freq / factor * ramp
yarn = YaRN(factor, length)
theirs = scaled_frequencies(Rope(scaling=yarn), d, theta)
print("equal to the library's:", torch.allclose(mine, theirs))
print(f"pair 14: plain {freq[14]:.10f}, scaled {mine[14]:.10f}")

# %% [markdown] id="stretch-temperature-text" slideshow={"slide_type": "skip"}
# YaRN has a second half that is easily lost. A longer text means more keys in each softmax, and
# the weights flatten; so the scores are raised a little: cosine and sine are multiplied by
# $0.1\ln(s)+1$, and the scores grow by its square. A config may give the factor itself, and then that one
# counts.

# %% id="stretch-temperature" slideshow={"slide_type": "skip"}
for s in (4, 8, 32, 40):
    m = YaRN(s).magnitude
    print(f"factor {s:2}: cos and sin times {m:.5f}, scores times {m**2:.4f}")
print("attention_factor=1.0 gives", YaRN(4.0, attention_factor=1.0).magnitude)

# %% [markdown] id="stretch-published-text" slideshow={"slide_type": "skip"}
# ### What published models do with it
#
# Six models by their own config files: how many pairs are kept, mixed, divided?


# %% id="stretch-read" slideshow={"slide_type": "skip"}
def read_position(fields):
    """The width that turns, theta and `Rope` from the fields of a config.json."""
    d = fields.get("head_dim") or fields["qk_rope_head_dim"]
    share = fields.get("partial_rotary_factor", fields.get("rotary_dim", d) / d)
    given = fields.get("rope_scaling", {})
    kind, scaling = given.get("rope_type", given.get("type")), None
    length = given.get("original_max_position_embeddings")
    if kind == "yarn":
        betas = given.get("beta_fast", 32.0), given.get("beta_slow", 1.0)
        scaling = YaRN(given["factor"], length, *betas, truncate=given.get("truncate", True))
    if kind == "llama3":
        bounds = given["low_freq_factor"], given["high_freq_factor"]
        scaling = Llama3(given["factor"], *bounds, length)
    nope_every = fields.get("no_rope_layer_interval")
    rope = Rope("half", share, kind == "proportional", scaling, nope_every)
    return (d if rope.proportional else round(d * share)), fields["rope_theta"], rope


# %% id="stretch-counts" slideshow={"slide_type": "skip"}
for name, fields in lesson.POSITION_FIELDS.items():
    d, theta, rope = read_position(fields)
    if rope.scaling is None:
        continue
    slowed = inverse_frequencies(d, theta) / scaled_frequencies(rope, d, theta)
    factor = rope.scaling.factor
    kept, divided = (slowed < 1 + 1e-9).sum(), (slowed > factor * (1 - 1e-9)).sum()
    mixed = d // 2 - kept - divided
    print(f"{name:20} factor {factor:2.0f}: {kept:2} kept, {mixed:2} mixed, {divided:2} divided")

# %% [markdown] id="stretch-published-after" slideshow={"slide_type": "skip"}
# Kimi K2 sets both thresholds to 1, a hard switch without a ramp; with the usual 32 and 1 it would
# be another split:

# %% id="stretch-kimi" slideshow={"slide_type": "skip"}
fields = dict(lesson.POSITION_FIELDS["Kimi-K2"])
d, theta, _ = read_position(fields)
turns = 4096 * inverse_frequencies(d, theta) / (2 * math.pi)
for fast in (1, 32):
    kept, divided = int((turns > fast).sum()), int((turns < 1).sum())
    mixed = d // 2 - kept - divided
    print(f"thresholds {fast:2} and 1: {kept} kept, {mixed} mixed, {divided} divided")
d, theta, rope = read_position(lesson.POSITION_FIELDS["Olmo-3-7B"])
print(f"Olmo 3, factor 8: attention factor {rope.scaling.magnitude:.5f}")

# %% [markdown] id="stretch-details" slideshow={"slide_type": "skip"}
# Two details that cost people days. DeepSeek-V3 does not put the attention factor on cosine and
# sine but multiplies the scale of the whole score by its square, so that the part of each key
# without positions grows too (module 09 has that part). And gpt-oss does not round the ends of the
# ramp to whole pairs (`truncate=False`).
#
# **A scaling that is computed and not used** cannot be seen in a short prompt. Two literal numbers
# guard against it: Llama 3's rule on a head of 64, and its most common mistake, a mix that is
# linear in the wavelength instead of in turns.

# %% id="stretch-llama" slideshow={"slide_type": "skip"}
rule = Llama3(32.0, 1.0, 4.0, 8192)
plain, scaled = inverse_frequencies(64, 5e5), scaled_frequencies(Rope(scaling=rule), 64, 5e5)
print("kept: pairs 0 to", int((scaled == plain).nonzero().max()), "| divided: pairs",
      int(torch.isclose(scaled * 32, plain).nonzero().min()), "to 31")  # fmt: skip
print("pairs 15, 16, 17:", [f"{v:.9g}" for v in scaled[15:18].tolist()])
wave = 2 * math.pi / plain[15]
kept = (8192 - wave) / (8192 - 8192 / 4)  # wrong: linear in the wavelength
wrong = (1 - kept) * plain[15] / 32 + kept * plain[15]
print(f"pair 15 unscaled {plain[15]:.9g}, mixed by wavelength {wrong:.9g}")

# %% [markdown] id="stretch-turn" slideshow={"slide_type": "skip"}
# **Turn it.** Choose theta, width and trained length of a model you know. Which rule leaves the
# fast pairs alone?

# %% id="stretch-explorable" slideshow={"slide_type": "skip"}
explorables.ladder_explorable()

# %% [markdown] id="stretch-exercise-text" slideshow={"slide_type": "skip"}
# **Your turn.** YaRN's frequencies for any width, base, factor, length and thresholds.


# %% id="exercise-yarn" tags=["exercise:yarn_frequencies"] slideshow={"slide_type": "skip"}
def my_yarn(d, theta, factor, original_length, beta_fast, beta_slow):
    """Frequencies (d/2,) after YaRN's scaling, in radians a position."""
    # 1. The plain frequencies theta^(-2i / d).
    # 2. Which pair i turns `turns` times within original_length? Solve
    #    original_length * theta^(-2i / d) / (2 pi) = turns for i, for beta_fast and beta_slow.
    # 3. Round outwards: the first down, the second up, and stay within 0 .. d - 1.
    # 4. A ramp over the pairs: 0 up to the first, 1 from the second on, linear between.
    # 5. Where the ramp is 0 keep the frequency, where it is 1 divide it by factor, else mix.
    ...


my_yarn = check("yarn_frequencies", my_yarn).use

# %% [markdown] id="stretch-notes" slideshow={"slide_type": "notes"}
# **8 minutes.** The figure carries it: a flat line at 8 means that neighbours, too, move together.
# Hold the question "does that hurt?" until section 14, where a trained model answers it. Do not
# present YaRN as free: published models were trained further after the change.

# %% [markdown] id="part-text" slideshow={"slide_type": "slide"}
# ## 9 · Turning only a part
#
# Three different ideas are easily taken for one.
#
# - **Partial**: only the first $r$ channels of a head turn, with a *full ladder over these $r$*:
#   exponents $-2i/r$. The rest carries pure content.
# - **Proportional**: the ladder spans the whole head, exponents $-2i/d_h$, but only its fast end turns; the
#   slow pairs stand still.
# - **NoPE layers**: some layers do not turn at all.

# %% [markdown] id="part-literal-text" slideshow={"slide_type": "skip"}
# First partial, on literal numbers, and its two classic mistakes. At position 0 all three agree.

# %% id="part-literal" slideshow={"slide_type": "skip"}
x, r = torch.arange(1.0, 9.0).view(1, 8), 4


def turn(freq):
    a = 5 * freq.float()[None]  # position 5
    return [round(v, 4) for v in apply_rope(x, a.cos(), a.sin())[0].tolist()]


print("right, ladder over 4:     ", turn(inverse_frequencies(4, 10000.0)))
print("wrong, ladder over all 8: ", turn(inverse_frequencies(8, 10000.0)[:2]))
angle = 5 * inverse_frequencies(4, 10000.0).float()
a, b = x[0, :2], x[0, 4:6]  # wrong: channel i with i + 8/2
a, b = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
across = torch.cat((a, x[0, 2:4], b, x[0, 6:]))
print("wrong, paired across:     ", [round(v, 4) for v in across.tolist()])

# %% [markdown] id="part-gemma" slideshow={"slide_type": "skip"}
# Partial and proportional can have the same share and even the same number of turning pairs, and
# still be opposites. A head of `512` channels with theta a million, a quarter of it turning:

# %% id="part-compare" slideshow={"slide_type": "skip"}
whole = inverse_frequencies(512, 1e6)
proportional = scaled_frequencies(Rope(fraction=0.25, proportional=True), 512, 1e6)
partial = inverse_frequencies(128, 1e6)
for name, freq in (("proportional", proportional), ("partial", partial)):
    waves = 2 * math.pi / freq[freq > 0]
    print(f"{name:13} {len(waves)} pairs turn, longest wavelength {waves.max():12,.0f} tokens")
print(
    "proportional is the fast end of the full ladder:", torch.equal(proportional[:64], whole[:64])
)

# %% id="part-figure"
fig, ax = figure(10.5, 2.8)
ax.plot(2 * math.pi / whole, ":", color=ROLE["stream"], label="full ladder, 256 pairs")
ax.plot(2 * math.pi / partial, "--", color=ROLE["k"], label="partial: a full ladder on fewer pairs")
ax.plot(2 * math.pi / proportional[:64], color=ROLE["q"], label="proportional: its fast end only")
labels = dict(yscale="log", xlabel="pair, fast to slow", ylabel="tokens a turn")
draw.titled(ax, "Same share, opposite hands: 64 of 256 pairs turn in both", **labels)
longest = [f"{2 * math.pi / freq:,.0f}" for freq in (partial[-1], proportional[63])]
show(
    fig,
    alt="The partial ladder climbs to millions of tokens within 64 pairs; the proportional one "
    "follows the full ladder and stops at 188.",
    summary=f"longest wavelength: partial {longest[0]}, proportional {longest[1]}",
)

# %% [markdown] id="part-read-text" slideshow={"slide_type": "skip"}
# ### Reading a config
#
# All of this stands in a few fields of a published config. `read_position` from section 8 turns
# them into a `Rope`, and the wavelengths follow:

# %% id="part-read" slideshow={"slide_type": "skip"}
print(
    "model                   turns of head    theta   longest wavelength  scaling  layers without"
)
for name, fields in lesson.POSITION_FIELDS.items():
    d, theta, rope = read_position(fields)
    head = fields.get("head_dim") or fields["qk_rope_head_dim"]
    freq = scaled_frequencies(rope, d, theta)
    longest = 2 * math.pi / freq[freq > 0].min()
    channels = 2 * int((freq > 0).sum())
    scaling = type(rope.scaling).__name__ if rope.scaling else "-"
    bare = f"every {rope.nope_every}th" if rope.nope_every else "-"
    print(
        f"{name:20} {channels:9} of {head:3} {theta:12,.0f} {longest:16,.0f}  {scaling:7}  {bare}"
    )

# %% [markdown] id="part-read-after" slideshow={"slide_type": "skip"}
# (For the models with latent attention the head counted here is its turning part.) A layer that
# does not turn costs one field: `Rope(nope_every=4)`. In SmolLM3's 36 layers that leaves nine
# without positions:

# %% id="part-nope" slideshow={"slide_type": "skip"}
rope = read_position(lesson.POSITION_FIELDS["SmolLM3-3B"])[2]
still = [layer for layer in range(36) if not rope.rotates(layer)]
print("layers that do not turn:", still, "-", len(still), "of 36")
mixed = ModernDecoder(Config(position=Rope(nope_every=4))).eval()
with torch.no_grad():
    run = trace(mixed, ids, flops=False)
for layer in (2, 3):
    q, turned = (run[f"blocks.{layer}.attn.{name}"].value for name in ("q", "q_rotated"))
    same = torch.allclose(mixed.blocks[layer].attn.q_norm(q), turned)
    print(f"layer {layer}: queries unturned: {same}")

# %% [markdown] id="part-notes" slideshow={"slide_type": "notes"}
# **5 minutes.** One question sorts them: "how long is the longest wavelength?" Partial: as long as
# a full head's. Proportional: short, since the slow hands are stopped. Section 14 shows what a
# trained model's slow hands are worth to it.

# %% [markdown] id="alibi-text" slideshow={"slide_type": "slide"}
# ## 10 · ALiBi: a penalty instead of a rotation
#
# Leave queries and keys alone; lower each score by the distance times a slope, $-m_h\,|n-m|$. Each
# head has its own fixed slope $m_h=2^{-8(h+1)/H}$.

# %% id="alibi-slopes" slideshow={"slide_type": "skip"}
H = 8
slopes = 2.0 ** (-8 * torch.arange(1, H + 1) / H)
print("slopes: ", ", ".join(f"1/{1 / s:.0f}" for s in slopes.tolist()))
bias = alibi_bias(H, T=4, S=4)
print("bias of head 0:", (bias[0] + 0.0).tolist(), sep="\n")
print(
    "equal to -slope * distance:", torch.equal(bias[2, 3], -slopes[2] * torch.tensor([3, 2, 1, 0]))
)
print("as a model:", ModernDecoder(Config(position=ALiBi())).cfg.position)

# %% [markdown] id="alibi-mask-text" slideshow={"slide_type": "skip"}
# BLOOM and MPT use this. Written as $m_h\cdot(m-n)$, as it often is, the bias of a *later* key is
# positive: a **bonus** for the future. With a causal mask nobody sees it. Without one, the head
# looks ahead:

# %% id="alibi-mask" slideshow={"slide_type": "skip"}
ahead = (torch.arange(8) - torch.arange(8)[:, None]).float()  # key minus query
free = (slopes[0] * ahead).softmax(-1)
masked = (slopes[0] * ahead).masked_fill(ahead > 0, -torch.inf).softmax(-1)
bias = slopes[0] * ahead[3]
print(f"bias of the next key: {bias[4]:+.1f}, of the one before: {bias[2]:+.1f}")
later = masked[3, 4:].sum(), free[3, 4:].sum()
print(f"weight of query 3 on later keys: with mask {later[0]:.2f}, without {later[1]:.2f}")

# %% [markdown] id="alibi-turn" slideshow={"slide_type": "skip"}
# **Turn it.** Take the mask away. Then choose the last head: how far does it see?

# %% id="alibi-explorable"
explorables.alibi_explorable()

# %% [markdown] id="alibi-notes" slideshow={"slide_type": "notes"}
# **3 minutes.** ALiBi *is* a decay with distance by construction; contrast it with section 6. An
# encoder needs the absolute value; code that drops it because the decoder's mask hides it is a bug
# in waiting.

# %% [markdown] id="none-text" slideshow={"slide_type": "skip"}
# ## 11 · No positions at all
#
# A decoder without any position code still has its causal mask, and the mask leaks order: a token
# sees as many keys as there are tokens before it. Let a head attend to everything equally, and let
# one token, the first, carry a mark. The mark's share is then one over the number of tokens so
# far:

# %% id="none-count" slideshow={"slide_type": "skip"}
mark = torch.zeros(8, 1)
mark[0] = 1.0  # the value of the first token; all others carry 0
uniform = torch.zeros(8, 8).masked_fill(~causal_mask(8), -torch.inf).softmax(-1)
share = (uniform @ mark).squeeze(1)
print("share of the mark:", [round(v, 3) for v in share.tolist()])
print("its reciprocal:   ", [round(v, 1) for v in (1 / share).tolist()])

# %% [markdown] id="none-after" slideshow={"slide_type": "skip"}
# So one layer can *count*, and later layers can compute with the count. Models of about a hundred
# million parameters trained this way do work on short texts (Kazemnejad et al.). Published models
# use it in some layers only, between others that turn.
#
# All schemes of this notebook at a glance:

# %% id="none-figure" slideshow={"slide_type": "skip"}
families = {
    "absolute, added once": ("sinusoids", "learned table"),
    "relative: RoPE": ("full", "partial", "proportional", "scaled: YaRN, Llama 3"),
    "relative: bias": ("ALiBi",),
    "none (NoPE)": ("the causal mask alone", "in some layers only"),
}
fig, ax = figure(11, 4.2)
draw.draw_families(ax, families)
save(fig, "05_families")
show(
    fig,
    alt="A tree: absolute codes added once, RoPE and its variants, biases, and none.",
    summary=f"{len(families)} families, {sum(map(len, families.values()))} members",
)

# %% [markdown] id="none-notes" slideshow={"slide_type": "notes"}
# **2 minutes.** "No positions" is not "no order": have somebody compute the share of the mark at
# the fifth token. Keep it apart from "no positions in some layers", which is what published models
# do.

# %% [markdown] id="precision-text" slideshow={"slide_type": "slide"}
# ## 12 · Precision: when positions run together
#
# Models run in 16-bit numbers, and a bfloat16 has eight significant bits. Whole numbers are exact
# up to $2^8$; then it counts in steps of 2, then 4, then 8. A float16 lasts eight times as long
# and then ends.

# %% id="precision-count" slideshow={"slide_type": "skip"}
for dtype, top in ((torch.bfloat16, 4097), (torch.float16, 65521)):
    stored = torch.arange(top).to(dtype)
    first = int((stored[1:] == stored[:-1]).nonzero()[0]) + 1
    finite = stored[stored.isfinite()]
    end = f"infinite from {len(finite):,}" if len(finite) < top else "no end in sight"
    distinct = stored[:4097].unique().numel()
    print(f"{str(dtype)[6:]:9} first repeats a position at {first}; 0 to 4096 give "
          f"{distinct} distinct values; {end}")  # fmt: skip

# %% id="precision-figure"
stored = torch.arange(1000, 1064).bfloat16().double()
exact = torch.arange(1000, 1064).double()
fig, ax = figure(10.5, 3.4)
ax.plot(exact, exact.cos(), color=ROLE["stream"], label="angle in float32")
ax.plot(exact, stored.cos(), color=ROLE["k"], drawstyle="steps-mid", label="position in bfloat16")
labels = dict(xlabel="position", ylabel="cosine of the fastest pair", ylim=(-1.15, 2.0))
draw.titled(ax, "Up to nine tokens share one angle", **labels)
show(
    fig,
    alt="A smooth cosine, and a staircase of a few wide steps that has nothing to do with it.",
    summary=f"64 positions from 1000: {stored.unique().numel()} distinct in bfloat16, "
    f"at most {stored.unique(return_counts=True)[1].max()} share one",
)

# %% [markdown] id="precision-cast-text" slideshow={"slide_type": "skip"}
# The usual way into this trap is not to *choose* bfloat16 for positions, but to cast a whole model
# that keeps its angles in a buffer. Below, the complete table is made in bfloat16 and compared
# with one made in float32 and cast last:

# %% id="precision-table" slideshow={"slide_type": "skip"}
freq, positions = inverse_frequencies(32, 10000.0), torch.arange(2048)
true = (positions.double()[:, None] * freq).cos()
low = (positions.bfloat16()[:, None] * freq.bfloat16()).cos().double()
late = (positions.float()[:, None] * freq.float()).cos().bfloat16().double()
for name, table in (("all in bfloat16", low), ("float32, cast last", late)):
    error = (table - true).abs()
    wrong = (error > 0.1).double().mean()
    print(f"{name:19} largest error {error.max():.4f}, entries off by more than 0.1: {wrong:.1%}")
print("distinct positions:", positions.bfloat16().unique().numel(), "of", len(positions))
model = ModernDecoder(Config())
before = model.rope(positions)[0]
after = model.to(torch.bfloat16).rope(positions)[0]
print("the library's table after .to(bfloat16) is the same:", torch.equal(before, after))

# %% [markdown] id="precision-far-text" slideshow={"slide_type": "skip"}
# Float32 is no cure at every length. It has 24 bits, so an angle of ten million radians is known
# to about half a radian. The score of section 4, at a distance of two, ever farther out:

# %% id="precision-far" slideshow={"slide_type": "skip"}
for n in (3, 100_001, 1_000_001, 10_000_001):
    far = score(n, n + 2, torch.float32)
    print(f"query at {n:12,}: float32 {far:.3f}, float64 {score(n, n + 2):.6f}")
apart = abs(score(100_001, 100_003) - score(3, 5))
print("float64 at 100,001 differs by less than 1e-11, but by something:", 0 < apart < 1e-11)

# %% [markdown] id="precision-turn" slideshow={"slide_type": "skip"}
# **Turn it.** Where does each type begin to lose positions?

# %% id="precision-explorable" slideshow={"slide_type": "skip"}
explorables.precision_explorable()

# %% [markdown] id="precision-notes" slideshow={"slide_type": "notes"}
# **4 minutes.** Move the start to the left in bfloat16 until the staircase disappears. The rule to
# take home: angles in float32, cast cosine and sine last. No buffer, and a cast of the model
# cannot hurt.

# %% [markdown] id="offset-text" slideshow={"slide_type": "skip"}
# ## 13 · Offsets: caches, packs, padding
#
# A model that generates text keeps the keys and values of the tokens so far, its *cache* (module
# 11), and reads only what is new: the text arrives in chunks. A chunk after $P$ cached tokens
# stands at positions $P, P+1, \dots$, and its token $i$ may see the keys $j\le P+i$. The most
# common RoPE bug of all is to start each chunk at 0 again. Since scores depend on differences, the
# tokens *inside* a chunk still agree with each other; only what lies before it moves.

# %% id="offset-chunk" slideshow={"slide_type": "skip"}
with torch.no_grad():
    full = decoder(ids)[0]
    restarted = with_mistakes(decoder, PositionsRestart)
    for name, model in (("right", decoder), ("positions restart", restarted)):
        caches = new_caches(model)
        first = model(ids[:, :10], caches)[0]
        second = model(ids[:, 10:], caches, pos_offset=10)[0]
        gaps = [(first - full[:, :10]).abs().max(), (second - full[:, 10:]).abs().max()]
        gaps = ["< 1e-5" if g < 1e-5 else f"{g:.3f}" for g in gaps]
        print(f"{name:18} first chunk off by {gaps[0]}, second by {gaps[1]}")
print(f"for comparison, the logits have a standard deviation of {full.std():.3f}")

# %% [markdown] id="offset-literal-text" slideshow={"slide_type": "skip"}
# One query at position 5 over six keys, in numbers that anybody can recompute (a small formula
# fills the tensors). Its weights when it is turned to 5, to 0 (the bug above), and to 6 (the
# offset counted after the new token was added):


# %% id="offset-literal" slideshow={"slide_type": "skip"}
def filled(rows, width, a):
    i = torch.arange(rows * width)
    return ((((a * i + i * i) % 31) - 15) / 16).view(rows, width)


q, keys = filled(6, 8, 3)[5], filled(6, 8, 5)
freq = inverse_frequencies(8, 10000.0).float()


def weights_at(position, shift=0):
    aq, ak = (position + shift) * freq[None], (torch.arange(6)[:, None] + shift) * freq
    score = apply_rope(q[None], aq.cos(), aq.sin()) @ apply_rope(keys, ak.cos(), ak.sin()).T
    return (score / math.sqrt(8)).softmax(-1)[0]


for position in (5, 0, 6):
    print(f"query turned to {position}:", [round(w, 4) for w in weights_at(position).tolist()])
later = weights_at(5, shift=7)
print("all positions 7 later: unchanged:", torch.allclose(weights_at(5), later, atol=1e-6))

# %% [markdown] id="offset-pack-text" slideshow={"slide_type": "skip"}
# **Packed documents.** Several short texts in one row, positions starting anew at each. The
# restart alone does not separate them: attention still crosses. Only a mask does.

# %% id="offset-pack" slideshow={"slide_type": "skip"}
from course_lib.model import AttentionCore

documents = torch.tensor([[0] * 5 + [1] * 7])
places = torch.tensor([*range(5), *range(7)])
cfg = Config(n_heads=2, n_kv_heads=2)
q, k, v = torch.randn(3, 1, 2, 12, 32, generator=torch.Generator().manual_seed(7))
angle = places[:, None] * inverse_frequencies(32, 10000.0).float()
q, k = (apply_rope(t, angle.cos(), angle.sin()) for t in (q, k))
core, seen = AttentionCore(cfg, 32**-0.5), []
core.see_weights.register_forward_hook(lambda module, inputs, weights: seen.append(weights))
for name, mask in (("causal", causal_mask(12)), ("document", document_mask(documents))):
    core.explicit(q, k, v, mask)
    crossing = seen[-1][0, :, 5:, :5].sum(-1).mean()
    print(f"{name + ' mask:':15} {crossing:.0%} of the second text's weight lies on the first")

# %% [markdown] id="offset-pad-text" slideshow={"slide_type": "skip"}
# **Left padding.** Rows of different length are padded in front, and positions count from the
# first *real* token. RoPE alone would not mind a row that is moved as a whole; the padding keys
# must be masked all the same.

# %% id="offset-pad" slideshow={"slide_type": "skip"}
short, long = ids[0, :5], ids[1, :9]
padded, real = left_pad([short.tolist(), long.tolist()], pad_id=0)
print("real tokens of row 0:", real[0].int().tolist())
with torch.no_grad():
    batch = decoder(padded, attention_mask=real)[0]
    alone = decoder(short[None])[0]
print("row 0 of the batch = the text alone:", torch.allclose(batch[0, -5:], alone[0], atol=1e-5))

# %% [markdown] id="offset-norm-text" slideshow={"slide_type": "skip"}
# **Norm, then turn.** Models with QK-Norm (module 06) normalise queries and keys *before* RoPE.
# The two steps commute only while both channels of a pair share one gain, so a freshly initialised
# model, with all gains 1, cannot tell the order; a trained one can.


# %% id="offset-norm" slideshow={"slide_type": "skip"}
def normed(x, gain):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain


x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
angle = 3 * inverse_frequencies(4, 10000.0).float()[None]
for gain in ([1.0, 1, 1, 1], [1.0, 2, 1, 2], [1.0, 2, 3, 4]):
    g = torch.tensor(gain)
    right = apply_rope(normed(x, g), angle.cos(), angle.sin())
    wrong = normed(apply_rope(x, angle.cos(), angle.sin()), g)
    print(f"gains {gain}: the order does not matter: {torch.allclose(right, wrong, atol=1e-5)}")
print("norm, then RoPE:", [round(v, 4) for v in right[0].tolist()])
print("RoPE, then norm:", [round(v, 4) for v in wrong[0].tolist()])
with torch.no_grad():
    fresh = (with_mistakes(decoder, NormAfterRope)(ids)[0] - full).abs().max()
print("in the fresh decoder, gains 1, the logits agree:", bool(fresh < 1e-4))

# %% [markdown] id="offset-short-text" slideshow={"slide_type": "skip"}
# Last, a **table that is too short**. A slice past the end of a table is no error, it just has
# fewer rows than there are tokens. With no row at all the tokens vanish from the result; a single
# row *broadcasts*, and three tokens are all turned as one. The library refuses both:

# %% id="offset-short" slideshow={"slide_type": "skip"}
table = torch.arange(16)[:, None] * inverse_frequencies(8, 10000.0).float()
for first in (16, 15):  # a table for positions 0 to 15; three tokens from `first` on
    rows = table[first : first + 3]
    print(f"tokens at {first} to {first + 2}: the slice has {len(rows)} rows")
    try:
        apply_rope(torch.randn(1, 3, 8), rows.cos(), rows.sin())
    except ValueError as error:
        print("  refused:", error)

# %% [markdown] id="offset-notes" slideshow={"slide_type": "notes"}
# **6 minutes.** "Cached equals uncached" finds the restarted chunk, but no bug that moves queries
# and keys together. Ask which bugs of this section a test of relative distance would miss: the
# layout, the sign, the order of norm and turn.

# %% [markdown] id="real-text" slideshow={"slide_type": "skip"}
# ## 14 · In a real model
#
# SmolLM2-135M was trained with RoPE: half-split, theta `100,000`, on texts of up to `8,192`
# tokens. We let it read an ordinary paragraph and measure its next-token loss, then change
# *nothing but the rotation*. The weights stay; every mistake of this notebook becomes a number of
# nats.

# %% id="real-load" slideshow={"slide_type": "skip"}
from course_lib.zoo.smollm2 import load_smollm2

smol, tokenizer = load_smollm2()
paragraph = torch.tensor([tokenizer.encode(lesson.PARAGRAPH)])
base = lesson.text_loss(smol, paragraph)
cfg = smol.cfg
print(f"theta {cfg.rope_theta:,.0f}, {cfg.max_seq_len:,} positions, heads of {cfg.d_head}")
print(lesson.PARAGRAPH[:75] + "...")
print(f"{paragraph.shape[1]} tokens, loss {base:.3f} nats a token")

# %% id="real-tools" slideshow={"slide_type": "skip"}
T, theta = paragraph.shape[1], smol.cfg.rope_theta


def loss_under(**changes):
    """The loss of the same weights under another Config."""
    return lesson.text_loss(lesson.under(smol, **changes), paragraph)


def keys_at(shift=0, theta=theta, pairing="half"):
    """The loss when only the keys are turned by these positions, base and layout."""
    angle = (torch.arange(T)[:, None] + shift) * inverse_frequencies(64, theta).float()

    def turn(keys):
        return apply_rope(keys, angle.cos(), angle.sin(), pairing)

    return lesson.text_loss(lesson.keys_turned(smol, turn), paragraph)


# %% id="real-mistakes" slideshow={"slide_type": "skip"}
losses = {
    "right": base,
    "all positions + 1000": lesson.text_loss(smol, paragraph, pos_offset=1000),
    "theta 10,000": loss_under(rope_theta=1e4),
    "q and k interleaved": loss_under(position=Rope("interleaved")),
    "values turned too": lesson.text_loss(with_mistakes(smol, RopeOnV), paragraph),
    "no rotation": loss_under(position=Rope(nope_every=1)),
    "keys: theta 10,000": keys_at(theta=1e4),
    "keys: interleaved": keys_at(pairing="interleaved"),
}
for name, loss in losses.items():
    print(f"{name:21} {loss:.3f}")

# %% [markdown] id="real-bars-text" slideshow={"slide_type": "slide"}
# ### Nothing but the rotation is changed
#
# SmolLM2-135M-Instruct reads one paragraph. **Queries and keys that disagree cost most.**

# %% id="real-bars"
fig, ax = figure(10.5, 4.2)
roles = ["stream"] * 3 + ["scores"] * 3 + ["k"] * 2
bars = ax.barh(list(losses), list(losses.values()), color=[ROLE[r] for r in roles])
ax.bar_label(bars, fmt=" %.2f")
ax.axvline(base, color="#1f2328", linestyle="--", linewidth=1.2)
ax.invert_yaxis()
labels = dict(xlabel="next-token loss (nats)", xlim=(0, 1.1 * max(losses.values())))
draw.titled(ax, "The same weights, another rotation", **labels)
save(fig, "05_smollm2_mistakes")
show(
    fig,
    alt="Bars of the loss. Shifting all positions changes nothing, another theta for both hardly "
    "anything; the wrong layout, turned values and no rotation cost about a nat or more; keys that "
    "disagree with their queries cost most.",
    summary=", ".join(f"{name} {loss:.2f}" for name, loss in losses.items()),
)

# %% [markdown] id="real-after" slideshow={"slide_type": "skip"}
# Read the bars from the top.
#
# - **Moving everything by a thousand positions changes nothing**, as the algebra says.
# - **Another theta for both** costs little on a short text: queries and keys still agree with each
#   other, and the fast hands, which theta hardly changes, do most of the work here.
# - **The wrong layout for both** keeps every property of RoPE and costs about a nat: the weights were
#   trained for other pairs.
# - **Queries and keys that disagree** cost most. Keys in the other layout are worse than no rotation
#   at all.
#
# Now move the keys alone by a few positions, as an offset bug in a cache would.

# %% id="real-offset" slideshow={"slide_type": "skip"}
shifts = (-4, -2, -1, 0, 1, 2, 4, 64)
curve = [keys_at(shift) if shift else base for shift in shifts]
fig, ax = figure(10.5, 3.4)
bars = ax.bar([f"{s:+d}" if s else "0" for s in shifts], curve, color=ROLE["k"])
ax.bar_label(bars, fmt="%.2f")
labels = dict(xlabel="keys turned this many positions too far", ylabel="loss (nats)", ylim=(0, 10))
draw.titled(ax, "Off by one already hurts, and backwards hurts more", **labels)
show(
    fig,
    alt="Loss over the offset of the keys: lowest at 0; one too far costs half a nat, one back "
    "more than five.",
    summary=", ".join(f"{s:+d}: {c:.2f}" for s, c in zip(shifts, curve, strict=True)),
)

# %% [markdown] id="real-offset-after" slideshow={"slide_type": "skip"}
# Keys one too far make every token look as if it stood one step nearer: the token itself seems to
# lie in the future, and the one before it takes its place. One position the other way, and a
# token's own key sits where its predecessor should be. Some heads look at exactly *one* token
# back; the next measurement finds one.

# %% [markdown] id="real-head-text" slideshow={"slide_type": "skip"}
# ### A head that reads the clock
#
# Thirty layers of nine heads: which of them looks most at the token just before? And *how* does it
# do it? A score is a sum over pairs of (length of q) × (length of k) × cosine. So take this head's
# **average** query and **average** key, two vectors and no text, and turn them: does that already
# explain where it looks?

# %% id="real-head" slideshow={"slide_type": "skip"}
run = trace(smol, paragraph, flops=False)
heads = [(layer, head) for layer in range(30) for head in range(9)]
look_back = {
    (layer, head): run[f"blocks.{layer}.attn.weights"].value[0, head].diagonal(-1)[8:].mean().item()
    for layer, head in heads
}
(layer, head), weight = max(look_back.items(), key=lambda item: item[1])
q = run[f"blocks.{layer}.attn.q"].value[0, head]
k = run[f"blocks.{layer}.attn.k"].value[0, head // smol.cfg.group_size]
strength, phase = lesson.mean_hands(q, k, inverse_frequencies(64, theta))
distance = torch.arange(13, dtype=torch.float64)
predicted = (strength * (distance[:, None] * inverse_frequencies(64, theta) + phase).cos()).sum(1)
scores = run[f"blocks.{layer}.attn.scores"].value[0, head]
measured = torch.tensor([scores.diagonal(-n).mean() for n in range(13)])
share = q.mean(0).norm() ** 2 / (q.norm(dim=-1) ** 2).mean()
print(f"layer {layer}, head {head}: {weight:.0%} of its weight lies on the token before")
print(f"{share:.0%} of its queries' squared length is the same vector in every token")
print("predicted from two averages:", [round(v, 1) for v in predicted[:5].tolist()])
print("measured mean scores:       ", [round(v, 1) for v in measured[:5].tolist()])

# %% [markdown] id="real-head-figure-text" slideshow={"slide_type": "slide"}
# ### A head that reads the clock
#
# Turn its **average** query and **average** key, and no text: does that explain where it looks?

# %% id="real-head-figure"
fig, (left, right_ax) = figure(11, 3.8, ncols=2)
left.plot(distance, predicted, color=ROLE["scores"], label="from the average query and key")
left.plot(distance, measured, "o", color=ROLE["q"], label="measured on the paragraph")
draw.titled(left, "It peaks one token back", xlabel="distance n - m (tokens)", ylabel="score")
right_ax.bar(range(32), strength, color=ROLE["q"])
draw.titled(right_ax, "Fast hands tell the place", xlabel="pair, fast to slow", ylabel="strength")
save(fig, "05_smollm2_head")
peaks, order = [int(y.argmax()) for y in (predicted, measured)], strength.argsort(descending=True)
show(
    fig,
    alt="Left: a curve with its peak at distance 1, and measured points on it. Right: strength by "
    "pair, large for the fastest pairs and for one slow one.",
    summary=f"layer {layer} head {head}: peak at distance {peaks[0]} predicted, {peaks[1]} "
    f"measured; strongest pairs {order[:3].tolist()}",
)

# %% [markdown] id="real-head-after" slideshow={"slide_type": "skip"}
# Two averages predict the curve almost exactly: this head all but ignores what
# tokens say and reads the clock. Its fastest pairs make the sharp peak at distance 1. The single strong slow pair hardly
# turns over these distances; it adds nearly the same to every score.
#
# This is what it means that a trained head "chooses its amplitudes and phases".

# %% [markdown] id="real-slow-text" slideshow={"slide_type": "skip"}
# How much are the slow hands worth? Stop them, from the slow end: proportional RoPE, on weights
# that never were trained for it.

# %% id="real-slow" slideshow={"slide_type": "skip"}
for share in (1.0, 0.5, 0.25, 0.125):
    loss = loss_under(position=Rope(fraction=share, proportional=True))
    print(f"fastest {round(32 * share):2} of 32 pairs turn: loss {loss:.3f}")

# %% [markdown] id="real-slow-after" slideshow={"slide_type": "skip"}
# Half of the pairs can stand still and this short text hardly notices. That is the idea behind
# proportional rotation: slow hands hold still over such distances anyway, and channels that do not
# turn can carry content.

# %% [markdown] id="real-stretch-text" slideshow={"slide_type": "skip"}
# ### Stretching a model that was never told
#
# Section 8 asked whether squeezing neighbours hurts. The rules of that section, applied to SmolLM2
# without any training, reading the same short paragraph:

# %% id="real-stretch" slideshow={"slide_type": "skip"}
rules = {
    "interpolation": lambda s: Interpolation(s),
    "NTK": lambda s: NTK(s),
    "YaRN": lambda s: YaRN(s, smol.cfg.max_seq_len),
    "Llama 3": lambda s: Llama3(s, original_length=smol.cfg.max_seq_len),
}
print(f"unscaled: {base:.3f}")
for name, rule in rules.items():
    print(f"{name:14} factor 4: {loss_under(position=Rope(scaling=rule(4.0))):.3f}")

# %% [markdown] id="real-copy-text" slideshow={"slide_type": "skip"}
# Interpolation alone costs a nat at factor 4, since the fast hands, too, now move four times too
# slowly. But does stretching *work*? A text longer than `8,192` tokens takes too long here, and is
# not needed: positions are just numbers. We give the model the first 48
# tokens, then the same tokens again, and let the second copy stand far away by adding a **gap** to its positions. A model that
# reaches back can copy, and its loss on the second copy is small.

# %% id="real-copy" slideshow={"slide_type": "skip"}
n = 48
sentence = paragraph[:, :n]
twice = torch.cat((sentence, sentence), dim=1)
distances = (n, 6000, 9000, 12000)


def copy_loss(scaling, distance):
    stretched = lesson.under(smol, position=Rope(scaling=scaling))
    return lesson.text_loss(lesson.spread(stretched, n, distance - n), twice, first=n)


copy = {}
for name in ("unscaled", "interpolation", "YaRN", "Llama 3"):
    scaling = None if name == "unscaled" else rules[name](4.0)
    copy[name] = [copy_loss(scaling, distance) for distance in distances]
    pairs = zip(distances, copy[name], strict=True)
    print(f"{name:14}", "  ".join(f"{distance:6,}: {loss:.2f}" for distance, loss in pairs))
print(f"without a copy to look at: {lesson.text_loss(smol, sentence):.2f}")

# %% [markdown] id="real-copy-figure-text" slideshow={"slide_type": "slide"}
# ### A copy, far away
#
# The same tokens again, a gap of positions between the two copies. Which rule still finds them?

# %% id="real-copy-figure"
fig, ax = figure(10.5, 4.0)
for (name, role, style) in (("unscaled", "stream", ":"), ("interpolation", "k", "--"),
                            ("YaRN", "q", "-"), ("Llama 3", "scores", "-.")):  # fmt: skip
    ax.plot(distances, copy[name], style, marker="o", color=ROLE[role], label=name)
ax.axvline(smol.cfg.max_seq_len, color="#1f2328", linestyle="--", linewidth=1.2)
ax.text(smol.cfg.max_seq_len + 100, ax.get_ylim()[1] * 0.94, "trained length")
labels = dict(xlabel="distance to the copy (positions)", ylabel="loss on the second copy (nats)")
draw.titled(ax, "Beyond the trained length the unscaled model stops finding the copy", **labels)
save(fig, "05_smollm2_copy")
show(
    fig,
    alt="The unscaled curve is low up to the trained length and high beyond; interpolation is high "
    "everywhere; YaRN and Llama 3 stay low beyond the trained length.",
    summary=f"at {distances[-2]:,}: " + ", ".join(f"{n} {v[-2]:.2f}" for n, v in copy.items()),
)

# %% [markdown] id="real-copy-after" slideshow={"slide_type": "skip"}
# Within the length it was trained on, the model copies across thousands of positions. Beyond, it
# fails, although nothing else about the text is new. The usual explanation: the slow hands stand at
# angles that they never had in training. YaRN and Llama 3's rule bring those angles back into the known range and leave
# neighbours alone, and without a single step of training the model still finds its copy at
# `12,000`. Interpolation brings them back as well, and breaks the neighbours.
#
# This is one text and one gap, not a benchmark; published models train on after such a change,
# and then interpolation works too.

# %% [markdown] id="real-notes" slideshow={"slide_type": "notes"}
# **9 minutes.** Let people guess the order of the bars before you show them; most expect "no
# rotation" to be worst. The head is the second thing to remember from today, after the clocks: two
# average vectors, and out comes "look one token back". For the gap, stress that nothing but a
# position number changes.

# %% [markdown] id="takeaways" slideshow={"slide_type": "slide"}
# ## Key takeaways
#
# - Attention without positions is **equivariant**: shuffled tokens give shuffled outputs. A causal
#   mask already breaks that; order must come from the mask or be put in.
# - A **sine with its cosine** makes a step of $k$ tokens one fixed matrix; with sines alone there is none.
# - **RoPE** turns queries and keys after the projections, in every layer, without parameters. For *fixed* $q$ and $k$ a score
#   then depends on $n-m$ only. It is no measure of distance and need not fall.
# - **Theta decides wavelengths**, not ability. Stretching rules slow the hands down; those that leave
#   the fast ones alone leave neighbours alone.
# - *Partial*, *proportional* and *NoPE layers* are three different things.
# - The classic bugs are **layout, offset, precision**. Shapes never show them; literal values and
#   a known model's loss do.

# %% [markdown] id="takeaways-notes" slideshow={"slide_type": "notes"}
# **3 minutes.** Cover the list and ask for the three classic bugs and how each shows itself. The
# self-check below makes a good last five minutes, or homework.

# %% [markdown] id="self-check" slideshow={"slide_type": "skip"}
# ## Self-check
#
# Answer first, then unfold; each answer is computed in the cell below.

# %% [markdown] id="self-check-one" slideshow={"slide_type": "skip"}
# **1.** Two words of a sentence trade places. No mask, no positions. What changes?
#
# <details><summary>Answer</summary>
#
# The two rows of the output trade places; all values stay. Equivariant, not invariant.
# </details>
#
# **2.** Why does every sine need its cosine?
#
# <details><summary>Answer</summary>
#
# The sine of a shifted angle is a mix of the old sine *and* cosine. With sines alone no matrix
# shifts all positions; the best one leaves an error.
# </details>
#
# **3.** Show that score(5, 8) = score(105, 108).
#
# <details><summary>Answer</summary>
#
# Rotations transpose to their inverse and add their angles, so only the difference of the
# positions is left in the score. The cell checks it to $10^{-12}$.
# </details>
#
# **4.** Theta goes from ten thousand to a million, heads of `128`. How many pairs stay below one
# turn in `4,096` tokens, before and after?
#
# <details><summary>Answer</summary>
#
# `18` before, `33` after.
# </details>
#
# **5.** A config says `rotary_dim` 64 and `head_dim` `128`. Which channels turn, and at which
# frequencies?
#
# <details><summary>Answer</summary>
#
# The first 64 channels, pair $i$ being channels $i$ and $i+32$; the ladder runs over 64, so the
# exponents are $-2i/64$. The other 64 pass unchanged.
# </details>

# %% id="self-check-answers" slideshow={"slide_type": "skip"}
swap = torch.tensor([1, 0, 2, 3])
print("1.", torch.allclose(attend(X[swap]), attend(X)[swap]))
sines = code[:, 0::2]
best = torch.linalg.lstsq(sines[:-10], sines[10:]).solution
print("2. an error is left:", bool((sines[:-10] @ best - sines[10:]).abs().max() > 0.01))
fixed_q, fixed_k = torch.randn(2, 8, generator=draw_seed, dtype=torch.float64)
print("3.", abs(score(5, 8) - score(105, 108)) < 1e-12)
below = [int((inverse_frequencies(128, t) * 4096 < 2 * math.pi).sum()) for t in (1e4, 1e6)]
print("4.", *below)
head, angle = torch.ones(1, 128), inverse_frequencies(64, 10000.0).float()[None]
moved = (apply_rope(head, angle.cos(), angle.sin()) != head)[0].nonzero().flatten().tolist()
print("5. channels that turn:", moved[0], "to", moved[-1])

# %% [markdown] id="sources" slideshow={"slide_type": "skip"}
# ## Sources
#
# - Sinusoids, learned tables: Vaswani et al., arXiv 1706.03762, section 3.5.
# - RoPE: Su et al., arXiv 2104.09864. ALiBi: Press et al., arXiv 2108.12409. No positions:
#   Kazemnejad et al., arXiv 2305.19466.
# - Position interpolation: Chen et al., arXiv 2306.15595. YaRN and NTK-aware scaling: Peng et al., arXiv
#   2309.00071. Llama 3's rule: arXiv 2407.21783 and its published code.
# - Partial rotation in use: MiniMax-01, arXiv 2501.08313; GLM-4.5, arXiv 2508.06471. Proportional rotation (p-RoPE):
#   arXiv 2410.06205.
# - Position fields of the models in section 9: their published config.json
#   files.
# - SmolLM2-135M-Instruct by Hugging Face, Apache-2.0, arXiv 2502.02737.
#
# ## Next
#
# **Module 06, the block:** the stream that all of this reads from, why it is never normalised
# itself, and what the norms before each layer do.
