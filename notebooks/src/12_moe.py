# %% [markdown] id="title" slideshow={"slide_type": "slide"}
# # 12 · Mixture of experts
#
# *A layer that stores far more weights than any single token ever meets. This notebook builds one,
# breaks it on purpose, and counts what it really costs.*
#
# | | |
# |---|---|
# | **You need** | SwiGLU (module 07), softmax and its gradient, a little PyTorch |
# | **You will learn** | to build router, dispatch and combine from plain torch; to tell the routing conventions in use apart by their gradient; to balance a router by a loss and without one, and to measure whether it helped; what a capacity drops; why experts became fine and some became shared; to count total and active weights of a published model to the last one |
# | **Time** | 80 minutes to read and run, 30 for the exercises |

# %% [markdown] id="title-notes" slideshow={"slide_type": "notes"}
# **2 minutes.** Two questions to hold on to: *what does one token meet*, and *what must be in
# memory*. Most wrong statements about mixtures of experts answer one of them with the number of
# the other.

# %% id="setup" slideshow={"slide_type": "skip"}
import math
import time

import torch
import torch.nn.functional as F

torch.set_num_threads(1)

from course_lib import GQA, Config, ModernDecoder, MoE, Router, load_balancing_loss, route
from course_lib.model import expert_capacity, keep_within_capacity
from course_lib.model.moe import combine_loop, combine_sorted
from course_lib.teaching import check, diagrams, theme
from course_lib.teaching.explorables import EXPLORABLES
from course_lib.teaching.lessons import moe as lesson
from course_lib.teaching.lessons import moe_figures as figures
from course_lib.trace import expert_usage, trace
from course_lib.training import next_token_loss, update_selection_bias
from course_lib.zoo.configs import MODELS, count_published, published
from course_lib.zoo.counts import count_parameters

# %% [markdown] id="first-figure-text" slideshow={"slide_type": "slide"}
# ## Two tokens, two paths, one set of weights
#
# Below, a decoder with 16 layers of 64 experts reads two tokens; each takes 8 experts a layer.
# Every cell is one expert, a small feed-forward network of its own. The coloured cells ran. **All
# cells are stored.**

# %% id="first-figure"
torch.manual_seed(0)
sizes = dict(n_heads=4, n_kv_heads=4, d_head=8, vocab_size=200, d_model=32, d_expert=16)
many = ModernDecoder(Config(n_layers=16, n_experts=64, n_experts_active=8, n_shared_experts=0,
                            first_k_dense=0, **sizes))  # fmt: skip
with torch.no_grad():
    _, router_logits = many(torch.tensor([[17, 94]]))
layers = zip(many.blocks, router_logits, strict=True)
chosen = torch.stack([block.ffn.route(z)[1] for block, z in layers])  # (L, 2, k)
both = [len(set(a) & set(b)) for a, b in chosen.tolist()]

fig, ax = theme.figure(12, 4.4)
figures.draw_paths({"17": chosen[:, 0].numpy(), "94": chosen[:, 1].numpy()}, 64, ax)
theme.save(fig, "12_two_paths")
theme.show(
    fig,
    alt="A grid of 16 layers by 64 experts. Each of two tokens lights eight cells a row, mostly "
    "different ones; most cells stay grey: stored, and not used by either.",
    summary=f"each token meets {16 * 8} of {16 * 64:,} experts; {sum(both)} of them are the same",
)

# %% [markdown] id="first-figure-notes" slideshow={"slide_type": "notes"}
# **3 minutes.** Ask what the grey cells cost: no time for this token, and all of their memory.
# Count one row aloud: eight blue, eight orange.

# %% [markdown] id="first-figure-after" slideshow={"slide_type": "skip"}
# This is what a mixture of experts buys: the number of weights grows with the number of experts
# $E$, the work for a token with the number of *active* experts $k$. Everything else in this
# notebook is the price: someone must choose (sections 2 and 4), the choices must be gathered into
# efficient work (sections 3 and 5), and all weights must still be kept somewhere (section 7).

# %% [markdown] id="build-text" slideshow={"slide_type": "slide"}
# ## 1 · Build it: route, gather, run, scatter
#
# One layer replaces the SwiGLU of a block:
#
# $$y = \sum_{e \in \text{top-}k} g_e \cdot \mathrm{SwiGLU}_e(x) \;+\; \sum_{s} \mathrm{SwiGLU}_s(x)$$
#
# The first sum runs over the $k$ *routed* experts a token chose, the second over *shared* experts
# that every token meets. We take the weights of a library layer and write every step in plain
# torch.

# %% id="build-layer" slideshow={"slide_type": "skip"}
torch.manual_seed(1)
cfg = Config(d_model=32, d_expert=16, n_experts=6, n_experts_active=2, n_shared_experts=1)
layer = MoE(cfg)
w = layer.state_dict()
x = torch.randn(2, 4, 32)  # (B, T, D): two rows of four tokens
flat = x.flatten(0, 1)  # (N, D): the router knows no rows and no order
print("x", tuple(x.shape), "as one list", tuple(flat.shape))

# %% [markdown] id="route-text" slideshow={"slide_type": "skip"}
# ### Route: one score for each expert
#
# The router is a single matrix. Each token gets one logit for each expert, keeps its $k$ largest,
# and takes a softmax over **those** $k$. (That is one of several conventions; section 2 compares
# them.)

# %% id="route" tags=["output-only"]
router_logits = flat @ w["gate.weight"].T  # (N, E)
best = router_logits.topk(2, dim=-1)
weights, chosen = best.values.softmax(-1), best.indices  # both (N, k)
print("router logits", tuple(router_logits.shape), "weights", tuple(weights.shape))
for n in range(3):
    pairs = [
        f"expert {e} x {g:.2f}"
        for e, g in zip(chosen[n].tolist(), weights[n].tolist(), strict=True)
    ]
    print(f"token {n}:", ", ".join(pairs))
mine = layer.route(router_logits)
print("as the library:", torch.allclose(weights, mine[0]), torch.equal(chosen, mine[1]))

# %% [markdown] id="gather-text" slideshow={"slide_type": "subslide"}
# ### Gather, run, scatter
#
# A token alone would multiply by eight matrices of its own. An expert instead collects *its*
# tokens into one small batch.

# %% [markdown] id="gather-where" slideshow={"slide_type": "skip"}
# `torch.where(chosen == e)` answers two questions at once: which
# tokens, and in which of their $k$ slots, so that each result meets its own weight on the way
# back.


# %% id="gather"
def swiglu(x, name):
    gate, up, down = (w[f"{name}.w_{part}.weight"] for part in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


out = torch.zeros_like(flat)  # (N, D)
for e in range(6):
    token, slot = torch.where(chosen == e)
    ran = swiglu(flat[token], f"experts.{e}")  # (tokens of e, D)
    out.index_add_(0, token, weights[token, slot, None] * ran)
    print(f"expert {e} gathers tokens {token.tolist()}: {tuple(ran.shape)}")

# %% [markdown] id="gather-after" slideshow={"slide_type": "skip"}
# Every token appears in exactly two of these lists. An expert may get any number of tokens, none
# included.

# %% id="build-shared" slideshow={"slide_type": "skip"}
out = out + swiglu(flat, "shared.0")  # every token, weight 1
y = out.view_as(x)
equal = torch.allclose(y, layer(x)[0], atol=1e-5)
print("out", tuple(y.shape), "- equal to the library's layer:", equal)

fig, ax = theme.figure(7.5, 3.4)
dense = torch.zeros(8, 6).scatter(1, chosen, weights)
figures.draw_weights(dense.numpy(), ax, "Two weights a token, and they sum to 1")
theme.show(
    fig,
    alt="A table of tokens by experts: two weights in each row, the other cells are hatched.",
    summary=f"weights in a row sum to 1: {torch.allclose(dense.sum(1), torch.ones(8))}; "
    f"tokens by expert {expert_usage(chosen, 6)}",
)

# %% [markdown] id="diagram-text" slideshow={"slide_type": "slide"}
# ### The same, drawn from a forward pass

# %% [markdown] id="diagram-click" slideshow={"slide_type": "skip"}
# The numbers in this diagram come from a recorded pass of a small decoder. Click a box for its
# formula and shapes.

# %% id="diagram" tags=["tall"]
torch.manual_seed(0)
model = ModernDecoder(Config())
run = trace(model, torch.randint(1000, (1, 6)))
diagrams.moe(model, run, layer=1)

# %% [markdown] id="diagram-notes" slideshow={"slide_type": "notes"}
# **6 minutes.** Follow one token by finger: flat list, router, two experts, back to *its own* row.
# Then ask who decides the batch size of expert 3. (The tokens do; that is the systems problem of
# section 3 and 5.)

# %% [markdown] id="break-text" slideshow={"slide_type": "slide"}
# ### Break it: five small slips, all of the right shape
#
# Each line below makes one mistake on the same weights and the same tokens.

# %% id="break" tags=["output-only"]
x8 = torch.randn(64, 32)
z8 = layer.gate(x8)
g8, c8 = layer.route(z8)
with torch.no_grad():
    right, shared = combine_loop(layer.experts, x8, g8, c8), layer.shared[0](x8)
    over_tokens = z8.topk(2).values.softmax(0)  # dim 0 instead of -1
    slips = {
        "left in the order of the experts": lesson.concatenated(layer.experts, x8, g8, c8) + shared,
        "out[token] += ..., repeated indices": lesson.overwritten(layer.experts, x8, g8, c8)
        + shared,
        "softmax over the tokens": combine_loop(layer.experts, x8, over_tokens, c8) + shared,
        "weights forgotten": combine_loop(layer.experts, x8, torch.ones_like(g8), c8) + shared,
        "shared expert forgotten": right,
    }
for name, wrong in slips.items():
    error = (wrong - right - shared).norm() / (right + shared).norm()
    bad = ((wrong - right - shared).abs().amax(1) > 1e-5).sum().item()
    print(f"{name:36} relative error {error:.2f}, wrong in {bad} of {len(x8)} tokens")

# %% [markdown] id="break-notes" slideshow={"slide_type": "notes"}
# **4 minutes.** Ask which of the five a shape test would catch. None. Then which would show in a
# first loss: none either, a fresh model is equally ignorant either way.

# %% [markdown] id="break-after"
# **Order of the experts.** Running the experts one after the other and concatenating gives the
# right rows in the wrong places: each token receives other tokens' thoughts. The remedy is to
# carry the token's index along and scatter by it.
#
# **Repeated indices.** `out[token] += v` with an index that occurs twice performs *one* of the two
# additions. The loop over experts is safe because a token occurs at most once for each expert; all
# slots at once need `index_add_`. A minimal case, three values for two places:

# %% id="repeated" tags=["output-only"]
index, values = torch.tensor([0, 0, 1]), torch.tensor([1.0, 2, 3])
lost, kept = torch.zeros(2), torch.zeros(2)
lost[index] += values
kept.index_add_(0, index, values)
print("out[index] += values", lost.tolist(), "  index_add_", kept.tolist())

# %% [markdown] id="empty-text" slideshow={"slide_type": "skip"}
# **An expert without tokens** is no error, but skipping it has a side effect: its weights get no
# gradient *at all* (`None`), where an optimiser or a data-parallel job may expect zeros. Running
# it on zero rows costs nothing and gives zeros.

# %% id="empty" slideshow={"slide_type": "skip"}
few = torch.randn(2, 32)
out, _ = layer(few.unsqueeze(0))
out.sum().backward()
unused = [e for e in range(6) if e not in layer.route(layer.gate(few))[1]]
grads = [layer.experts[e].w_up.weight.grad for e in unused]
print("experts without a token:", unused)
print("their gradients exist and are zero:", all(g is not None and not g.any() for g in grads))
layer.zero_grad()

# %% [markdown] id="conventions-text" slideshow={"slide_type": "slide"}
# ## 2 · Whose softmax? Conventions, told apart by gradient
#
# Published models agree on "the top $k$ of $E$" and on little else. **None is "the" rule:**
#
# | `Router(kind)` | weights $g_e$ of the chosen | used by |
# |---|---|---|
# | `softmax_selected` (default here) | softmax over the $k$ chosen logits | Mixtral, gpt-oss |
# | `softmax_all` | softmax over all $E$, chosen keep their share | Switch, OLMoE |
# | `softmax_renormalized` | the same, divided by the sum of the chosen | Qwen3, Qwen3-Next |
# | `sigmoid` | sigmoids, divided by the sum of the chosen | DeepSeek-V3, GLM-4.5 |

# %% id="conventions" tags=["output-only"]
logits = torch.tensor([[1.0, 2, 3, 4]])
for kind in ("softmax_selected", "softmax_all", "softmax_renormalized", "sigmoid"):
    g, c = route(logits, 2, Router(kind))
    print(f"{kind:22} experts {c[0].tolist()} weights {[round(v, 4) for v in g[0].tolist()]} "
          f"sum {g.sum():.4f}")  # fmt: skip
twice = route(logits, 2, Router("softmax_all"))[0].softmax(-1)
print("softmax twice (wrong) ", [round(v, 4) for v in twice[0].tolist()])

# %% [markdown] id="conventions-after" slideshow={"slide_type": "skip"}
# The first and the third give the same numbers, always: dividing by the sum of the chosen cancels
# the denominator of the softmax. So a report that "model A takes the softmax before, model B after
# the selection" may describe one and the same function. What changes the function is whether the
# weights are renormalised at all.

# %% [markdown] id="top1-text"
# Now let each token take **one** expert, with the logits 2, 0 and -1:

# %% id="top1" tags=["output-only"]
z = torch.tensor([[2.0, 0.0, -1.0]], requires_grad=True)
p = z.softmax(-1)
print("softmax over all       p =", [round(v, 4) for v in p[0].tolist()])
for kind in ("softmax_all", "softmax_selected", "softmax_renormalized", "sigmoid"):
    g, _ = route(z, 1, Router(kind))
    (slope,) = torch.autograd.grad(g[0, 0], z)
    rounded = [round(v, 4) + 0.0 for v in slope[0].tolist()]
    print(f"{kind:22} weight {g.item():.4f}  d weight / dz = {rounded}")

# %% [markdown] id="top1-after" slideshow={"slide_type": "skip"}
# **One weight divided by itself is 1, whatever the logits.** Three of the four conventions turn
# the router off at $k = 1$: its output is constant, so no task loss can train it. Only the full
# softmax keeps a slope, `0.1318` for its own logit.

# %% [markdown] id="dead-gate-text" slideshow={"slide_type": "skip"}
# Does this really happen inside a layer? Here is the gradient of the gate in one layer, with only
# the convention changed.

# %% id="dead-gate" slideshow={"slide_type": "skip"}
torch.manual_seed(0)
single = MoE(Config(d_model=32, d_expert=16, n_experts=6, n_experts_active=1,
                    router=Router("softmax_all")))  # fmt: skip
for kind in ("softmax_all", "softmax_selected"):
    single.router = Router(kind)  # behind the back of Config, which would refuse
    single.zero_grad()
    single(x)[0].square().sum().backward()
    print(f"{kind:18} gate.grad all zero: {not single.gate.weight.grad.any()}")
try:
    Config(n_experts_active=1)
except ValueError as error:
    print("ValueError:", error)

# %% [markdown] id="dead-gate-notes" slideshow={"slide_type": "notes"}
# **7 minutes.** Let people predict the four rows at k = 1 before you run them. Somebody will
# object that the balance loss still trains the gate. True: then the router learns to be even, and
# nothing about the task.

# %% [markdown] id="conventions-explore-text" slideshow={"slide_type": "slide"}
# ### Turn it
#
# Five routers on the same four logits. Raise $k$ from 1 to 2 and watch three rows come alive; move
# the selection bias and watch an expert enter without its weight following.

# %% id="conventions-explore"
EXPLORABLES["moe_conventions"]()

# %% [markdown] id="conventions-explore-after" slideshow={"slide_type": "skip"}
# The last row is a sigmoid that is *not* divided: its scores do not compete, so its slope touches
# one logit only. Llama 4 routes to one expert that way, and multiplies the expert's **input** by
# the weight. SwiGLU is not linear, so that is another function than weighing the output.
#
# A common claim is that top-1 is unstable while $k > 1$ makes routing smooth. Both jump: where two
# logits cross, an expert is exchanged for another, at any $k$ below $E$. The next cell moves one
# logit across such a boundary.

# %% id="jump" slideshow={"slide_type": "skip"}
torch.manual_seed(3)
row = torch.randn(1, 32)
for k in (1, 2):
    base = torch.tensor([[2.0, 1.0, 0.5, -1, -1, -1]])
    ahead, behind = base.clone(), base.clone()
    ahead[0, k], behind[0, k] = base[0, k - 1] + 1e-4, base[0, k - 1] - 1e-4
    with torch.no_grad():
        outs = [
            combine_loop(layer.experts, row, *route(z, k, Router("softmax_all")))
            for z in (ahead, behind)
        ]
    jump = (outs[0] - outs[1]).norm() / outs[0].norm()
    print(f"k = {k}: a logit moves by 0.0002, the output changes by {jump:.2f} of its length")

# %% [markdown] id="bias-text" slideshow={"slide_type": "slide"}
# ### DeepSeek-V3's router: choose by one score, weigh by another
#
# Scores are sigmoids. A bias $b_e$ is added **for the choice only**; the weights come from the
# bare scores. Section 4 shows what moves $b$. Before the choice, the experts stand in groups, and
# only the groups whose two best ranked experts sum highest are open: this bounds how many machines
# a token is sent to.

# %% id="bias"
logits, bias = torch.tensor([[1.0, 0, -1, 2]]), torch.tensor([0, 0, 0.9, 0])
scores = logits.sigmoid()
ranked = (scores + bias).topk(2).indices
bare, biased = scores.gather(1, ranked), (scores + bias).gather(1, ranked)
for name, (g, c) in {
    "bias for the choice only": route(logits, 2, Router("sigmoid"), bias),
    "bias in the weights (wrong)": (biased / biased.sum(), ranked),
    "bias ignored (wrong)": route(logits, 2, Router("sigmoid")),
}.items():
    pairs = sorted(zip(c[0].tolist(), g[0].tolist(), strict=True))
    print(f"{name:28}", ", ".join(f"expert {e}: {v:.4f}" for e, v in pairs))

# %% [markdown] id="bias-notes" slideshow={"slide_type": "notes"}
# **4 minutes.** Have the room compute sigmoid(0) and sigmoid(-1) + nine tenths in their heads:
# that is why expert 2 enters. Its weight stays small, since it is weighed by its own score.

# %% [markdown] id="bias-after" slideshow={"slide_type": "skip"}
# With the bias in the weights, balancing would change *what the layer computes*: the unloved
# expert 2 would get more than half of the say because it is idle, not because it fits.
#
# The groups hold a trap as well. A closed group must be masked with $-\infty$. Masked with 0, it
# wins as soon as all open experts rank below 0, which a negative bias makes possible:

# %% id="groups" slideshow={"slide_type": "skip"}
grouped = Router("sigmoid", selection_bias=True, n_groups=2, n_groups_active=1)
logits, bias = torch.tensor([[1.0, 2, 0, 0.5]]), torch.full((4,), -2.0)
ranked = logits.sigmoid() + bias
with_zero = ranked.clone()
with_zero[0, 2:] = 0.0  # the second group is closed
print("ranked scores     ", [round(v, 3) for v in ranked[0].tolist()], "- groups {0, 1} and {2, 3}")
print("closed with -inf  ", sorted(route(logits, 2, grouped, bias)[1][0].tolist()))
print("closed with 0     ", sorted(with_zero.topk(2).indices[0].tolist()), "(wrong)")

# %% [markdown] id="exercise-biased-text" slideshow={"slide_type": "skip"}
# ### Your turn: route as DeepSeek-V3 does
#
# Fill in the function and run the cell. The check compares with the library and names the mistakes
# it knows.


# %% id="exercise-biased-routing" tags=["exercise:biased_routing"] slideshow={"slide_type": "skip"}
def biased_routing(router_logits, k, router, bias):
    """(N, E) logits and a bias (E,) to weights and indices (N, k), as DeepSeek-V3 routes."""
    # 1. Scores are sigmoids. The bias is added for ranking only: ranked = scores + bias.
    # 2. The E experts stand in router.n_groups groups of neighbours. A group's worth is the
    #    sum of its two best ranked; only the router.n_groups_active best groups stay open.
    # 3. Each token takes the k best ranked of its open groups.
    # 4. Weights: the chosen scores without bias, divided by their sum, times router.scaling.
    ...


biased_routing = check("biased_routing", biased_routing).use

# %% [markdown] id="forms-text" slideshow={"slide_type": "slide"}
# ## 3 · Loop, sort, grouped product: three ways, one sum
#
# The loop asks $E$ times "who is mine?". Sorting asks once: order all $N k$ slots by expert, and
# each expert's tokens lie in one slice. A *grouped* matrix product multiplies every slice by its
# own matrix in one call, as the "dropless" GPU kernels do (MegaBlocks, arXiv 2211.15841).


# %% id="forms"
def stacked(experts):
    parts = ("w_gate", "w_up", "w_down")
    return [torch.stack([getattr(e, part).weight.T for e in experts]) for part in parts]


def combine_grouped(stacks, flat, weights, chosen):
    gate, up, down = stacks  # each (E, in, out)
    order = chosen.flatten().argsort(stable=True)  # slots, sorted by expert
    token = order // chosen.shape[-1]
    ends = chosen.flatten().bincount(minlength=len(gate)).cumsum(0).to(torch.int32)
    rows = flat[token]  # (N k, D)
    hidden = F.silu(F.grouped_mm(rows, gate, offs=ends)) * F.grouped_mm(rows, up, offs=ends)
    ran = weights.flatten()[order, None] * F.grouped_mm(hidden, down, offs=ends)
    return torch.zeros_like(flat).index_add(0, token, ran)


# %% id="forms-equal" tags=["output-only"]
torch.manual_seed(0)
wide = MoE(Config(d_model=64, d_expert=32, n_experts=128, n_experts_active=4))
tokens = torch.randn(256, 64)
with torch.no_grad():
    g, c = wide.route(wide.gate(tokens))
    forms = {
        "loop": (combine_loop, wide.experts),
        "sorted": (combine_sorted, wide.experts),
        "grouped": (combine_grouped, stacked(wide.experts)),
    }
    results = {name: form(experts, tokens, g, c) for name, (form, experts) in forms.items()}
for name in ("sorted", "grouped"):
    print(f"loop = {name:8} {torch.allclose(results['loop'], results[name], atol=1e-5)}")

# %% [markdown] id="forms-time-text" slideshow={"slide_type": "skip"}
# How long they take depends on the machine and on the sizes; the ratios of *this* run follow. The
# order of the sums differs between the forms, so results agree to rounding, not to the last bit.


# %% id="forms-time" tags=["nbval-ignore-output"] slideshow={"slide_type": "skip"}
@torch.no_grad()
def seconds(form, experts, repeats=5):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        form(experts, tokens, g, c)
        times.append(time.perf_counter() - start)
    return min(times)


measured = {name: seconds(*form) for name, form in forms.items()}
for name, t in measured.items():
    print(f"{name:8} {measured['loop'] / t:.2f} times the speed of the loop")

# %% [markdown] id="forms-notes" slideshow={"slide_type": "notes"}
# **4 minutes.** The readable form is the specification, the fast form is tested against it. The
# stacked weights are a copy derived from the experts. On several machines a fourth step joins: an
# all-to-all exchange brings tokens to the machines that hold their experts, and back.

# %% [markdown] id="balance-text" slideshow={"slide_type": "slide"}
# ## 4 · Balance: who keeps the experts busy?
#
# A router that prefers an expert trains that expert more, which makes it preferable. And hardware
# wants even loads. The classical remedy is an extra loss for each layer (Switch, arXiv
# 2101.03961):
#
# $$\mathcal{L} = \alpha\, E \sum_e f_e P_e$$
#
# $f_e$ counts what was **chosen**, $P_e$ is the mean **probability** of expert $e$ under the full
# softmax.


# %% id="balance" tags=["output-only"]
def cost(logits, k, alpha=0.01, divide_by_k=False):
    chosen = logits.topk(k).indices
    return load_balancing_loss(logits, chosen, logits.shape[1], alpha, divide_by_k).item()


even = 20 * torch.eye(8)  # eight tokens, each sure of another expert
pairs = even + even.roll(1, dims=1)  # each torn between two
one = torch.zeros(8, 8)
one[:, 0] = 20  # all sure of expert 0
print(f"even, k = 1               {cost(even, 1):.4f}  = alpha")
print(f"even, k = 2               {cost(pairs, 2):.4f}  = alpha k (f counts selections a token)")
print(f"even, k = 2, over k       {cost(pairs, 2, divide_by_k=True):.4f}  = alpha (f counts slots)")
print(f"all on one expert, k = 1  {cost(one, 1):.4f}  = alpha E")

# %% [markdown] id="balance-notes" slideshow={"slide_type": "notes"}
# **6 minutes.** Write f and P on the board for the crowded case. Ask which of the two a gradient
# can reach, and what happens if both were probabilities.

# %% [markdown] id="balance-after"
# **Two conventions.** If $f_e$ is the number of selections of expert $e$ *a token*, the $f_e$ sum
# to $k$ and even use costs $\alpha k$. That is the library's default, and that of the Hugging Face
# implementations. If $f_e$ is the share of *slots*, they sum to 1 and even use costs $\alpha$. A
# loss of `0.0200` is perfect in one and twice the floor in the other, so say which one you log.

# %% [markdown] id="balance-gradient-text" slideshow={"slide_type": "skip"}
# How can such a loss train anything, when counting has no gradient? Only $P$ carries one. With $f$
# held fixed, $\partial \mathcal L / \partial z = \alpha E \sum_e f_e\, \partial P_e / \partial z$:
# the busier an expert, the more a gradient step takes from its probability.

# %% id="balance-gradient" slideshow={"slide_type": "skip"}
z = torch.tensor([[2.0, 1, 0, 0], [2, 0, 1, 0], [2, 0, 0, 1], [0, 2, 1, 0]], requires_grad=True)
for k in (1, 2):
    loss = load_balancing_loss(z, z.topk(k).indices, 4, alpha=1.0)
    print(f"k = {k}: loss {loss.item():.4f}, over k {loss.item() / k:.4f}")
load_balancing_loss(z, z.argmax(-1, keepdim=True), 4, alpha=1.0).backward()
print("k = 1: slots a token f =", (F.one_hot(z.argmax(-1), 4).float().mean(0)).tolist())
print("gradient of token 0:", [round(v, 4) for v in z.grad[0].tolist()])

# %% [markdown] id="balance-gradient-after" slideshow={"slide_type": "skip"}
# The gradient pushes the crowded expert 0 down (a step goes *against* it) and all others up.
#
# Is even use then the minimum? No. $f$ follows $P$ only through the choice, so the loss is a
# *surrogate*. Even use always costs $\alpha$ at $k = 1$. The next cell has uneven use that costs
# less.

# %% id="surrogate" slideshow={"slide_type": "skip"}
unsure = torch.tensor([[0.1, 0.0], [0.0, 0.1]])  # even use, probabilities near one half
tilted = torch.tensor([[0.01, 0], [0.01, 0], [0, 9]])  # two to one for expert 0
for name, z in (("even use", unsure), ("uneven use", tilted)):
    f, P = F.one_hot(z.argmax(-1), 2).float().mean(0), z.softmax(-1).mean(0)
    shown = [[round(v, 2) for v in vector.tolist()] for vector in (f, P)]
    print(f"{name:11} f = {shown[0]}, P = {shown[1]}: E sum f P = {2 * (f * P).sum():.4f}")

# %% [markdown] id="surrogate-after" slideshow={"slide_type": "skip"}
# The uneven router pays less: expert 0 is chosen often, each time by a hair, while expert 1 is
# chosen once and with all its probability. The loss works in practice because choice and
# probability usually go together, not because its minimum is even use.
#
# (Two more helpers you may meet: a *router z-loss* keeps logits small, and *jitter* multiplies the
# router's input by noise during training. Both are optional.)
#
# Two more slips belong to this loss. Joining the layers before counting lets one layer's crowd
# cancel another's; and padding counts as tokens unless it is left out.

# %% id="balance-slips" slideshow={"slide_type": "skip"}
layer1, layer2 = torch.tensor([[9.0, 0], [9, 0]]), torch.tensor([[0.0, 9], [0, 9]])
joined = torch.cat((layer1, layer2))
print(f"one expert each: {cost(layer1, 1, 1.0):.4f} and {cost(layer2, 1, 1.0):.4f}, "
      f"joined (wrong) {cost(joined, 1, 1.0):.4f}")  # fmt: skip
z = torch.tensor([[4.0, 0, 0], [0, 4, 0], [0, 0, 4], [4, 0, 0], [4, 0, 0], [4, 0, 0]])
real = torch.tensor([1, 1, 1, 0, 0, 0]).bool()  # three tokens, three pads
top = z.topk(1).indices
print(f"padding left out {load_balancing_loss(z, top, 3, 1.0, real=real):.4f}, "
      f"counted (wrong) {load_balancing_loss(z, top, 3, 1.0):.4f}")  # fmt: skip

# %% [markdown] id="exercise-balance-text" slideshow={"slide_type": "skip"}
# ### Your turn: the balance loss


# %% id="exercise-balance-loss" tags=["exercise:balance_loss"] slideshow={"slide_type": "skip"}
def my_balance_loss(router_logits, topk_idx, n_experts, alpha=0.01):
    """router_logits (N, E) and chosen experts topk_idx (N, k) of one layer to a scalar."""
    # 1. f (E,): how often each expert was chosen, a token; F.one_hot helps.
    # 2. P (E,): the mean of the softmax over all experts.
    # 3. alpha * E * sum of f * P; the gradient flows through P.
    ...


balance = check("balance_loss", my_balance_loss).use

# %% [markdown] id="bias-balance-text" slideshow={"slide_type": "skip"}
# ### Balance without a loss: move the bias
#
# A balance loss pulls on the same weights as the task. Bias balancing (arXiv 2408.15664) leaves
# them alone: after each batch, $b_e \leftarrow b_e + \gamma\,\mathrm{sign}(\bar\ell - \ell_e)$,
# where $\ell_e$ is the load of expert $e$. Nothing is differentiated; $b$ enters the choice only.

# %% id="bias-balance" slideshow={"slide_type": "skip"}
biased = MoE(
    Config(d_model=32, d_expert=16, n_experts=4, router=Router("sigmoid", selection_bias=True))
)
logits = torch.tensor([[3.0, 0.5, 0.0, -0.5]]) + 0.5 * torch.randn(
    400, 4, generator=torch.Generator().manual_seed(0)
)
for step in range(101):
    chosen = biased.route(logits)[1]
    if step % 25 == 0:
        print(f"after {step:>3} updates: tokens by expert {expert_usage(chosen, 4)}, even is 200")
    update_selection_bias(biased, chosen, gamma=0.01)

# %% [markdown] id="bias-balance-after" slideshow={"slide_type": "skip"}
# DeepSeek-V3 balances this way. It is sometimes said to have *no* auxiliary loss; its report
# describes the bias **plus** a small sequence-wise balance term against extreme cases within one
# sequence (arXiv 2412.19437, section 2.1.2).

# %% [markdown] id="toy-text" slideshow={"slide_type": "slide"}
# ### An honest experiment
#
# Does a router collapse without help? We train the library's layer on a small task: tokens from 16
# clusters, each cluster with a linear map of its own to learn. One run starts unbiased. The others
# start with a router that prefers expert 0 by 3.


# %% id="toy-tools" slideshow={"slide_type": "skip"}
def toy(start, alpha=0.0, gamma=0.0, steps=160, E=8):
    torch.manual_seed(0)
    centres, maps = torch.randn(16, 16), torch.randn(16, 16, 16) / 4
    moe = MoE(Config(d_model=16, d_expert=32, n_experts=E, n_shared_experts=0,
                     router=Router("sigmoid", selection_bias=True)))  # fmt: skip
    with torch.no_grad():
        moe.gate.weight[:, 0] = start * torch.eye(E)[0]  # channel 0 of a token is always 1
    optimizer = torch.optim.Adam(moe.parameters(), lr=5e-3)
    loads, errors = [], []
    for _ in range(steps):
        cluster = torch.randint(16, (96,))
        x = centres[cluster] + 0.3 * torch.randn(96, 16)
        x[:, 0] = 1
        out, logits = moe(x)
        chosen = moe.route(logits)[1]
        error = F.mse_loss(out, (x[:, None] @ maps[cluster])[:, 0])
        optimizer.zero_grad()
        (error + load_balancing_loss(logits, chosen, E, alpha)).backward()
        optimizer.step()
        if gamma:
            update_selection_bias(moe, chosen, gamma)
        loads.append(lesson.load_of(chosen, E)), errors.append(error.item())
    return torch.stack(loads).view(-1, 10, E).sum(1), errors  # loads of ten steps each


# %% id="toy"
runs = {
    "unbiased start, no help": toy(0.0),
    "biased start, no help": toy(3.0),
    "biased, alpha = 0.1": toy(3.0, alpha=0.1),
    "biased, gamma = 0.01": toy(3.0, gamma=0.01),
}
even = {name: [lesson.evenness(load) for load in run[0]] for name, run in runs.items()}
errors = [sum(run[1][-20:]) / 20 for run in runs.values()]
fig, axes = theme.figure(12, 3.8, ncols=3, width_ratios=(1.5, 1, 1))
figures.draw_evenness(even, axes[0], window=10)
for ax, name in zip(axes[1:], ("biased start, no help", "biased, gamma = 0.01"), strict=True):
    loads = runs[name][0]
    figures.draw_shares((loads / loads.sum(1, keepdim=True)).T.numpy(), ax, name, window=10)
axes[1].set_ylabel("expert")
verdicts = [f"{name:24} ends even (above 0.95): {e[-1] > 0.95}" for name, e in even.items()]
verdicts += [f"worst task error below 1.5 times the best: {max(errors) < 1.5 * min(errors)}"]
theme.show(
    fig,
    alt="Evenness of the load over training. The unbiased router stays even without help; the "
    "biased one stays uneven without help, and becomes even with a balance loss or a moving bias.",
    summary="\n".join(verdicts),
)

# %% [markdown] id="toy-after" slideshow={"slide_type": "skip"}
# **Verdict, for one seed of a toy.** An unbiased start does *not* collapse, with no help at all. A
# biased start persists: nothing in the task pushes the crowd apart. Both remedies even out the
# load. And the task hardly cares: the errors of all four runs are close. (A likely reason: each
# token's second slot still chooses among the other seven.) In large models imbalance costs
# throughput and idle weights; that it must ruin a small model's loss is not what this experiment
# shows.

# %% [markdown] id="toy-notes" slideshow={"slide_type": "notes"}
# **6 minutes.** Take bets on the four lines before showing them. The honest point is the second
# half: an experiment that was expected to show a disaster shows persistence, and we report that.

# %% [markdown] id="balance-explore-text" slideshow={"slide_type": "skip"}
# ### Turn it: alpha, gamma, start bias
#
# Each move of a slider trains a still smaller layer anew (linear experts, the same router and the
# same loss).

# %% id="balance-explore" slideshow={"slide_type": "skip"}
EXPLORABLES["moe_balance"]()

# %% [markdown] id="usage-text" slideshow={"slide_type": "slide"}
# ### Reading a load: against what?
#
# "Expert 3 got twice as much as expert 5" means nothing by itself. Compare with tokens that choose
# **independently and evenly**: then a load scatters around $Nk/E$ with standard deviation
# $\sqrt{N \tfrac kE (1-\tfrac kE)}$. Below, a decoder with fresh weights reads a batch.

# %% id="usage"
torch.manual_seed(0)
crowd = torch.randint(1000, (16, 64))  # 1024 tokens
with torch.no_grad():
    _, router_logits = model(crowd)
routers = [block.ffn for block in model.blocks if block.is_moe]
loads = [expert_usage(m.route(z)[1], 8) for m, z in zip(routers, router_logits, strict=True)]
mean, deviation = lesson.spread_if_independent(crowd.numel(), 8, 2)
fig, axes = theme.figure(12, 3.2, ncols=3, sharey=True)
figures.draw_load_by_layer(loads, mean, deviation, axes)
rows = [f"layer {i + 1}: {n}, evenness {lesson.evenness(n):.3f}" for i, n in enumerate(loads)]
theme.show(
    fig,
    alt="Loads of eight experts in three layers. In each layer most bars end outside the grey "
    "band in which independent choices would fall.",
    summary=f"independent: {mean:.0f} +- {deviation:.1f} slots\n" + "\n".join(rows),
)

# %% [markdown] id="usage-notes" slideshow={"slide_type": "notes"}
# **4 minutes.** The grey band is the point: a histogram without a reference can be read as
# anything.

# %% [markdown] id="usage-after" slideshow={"slide_type": "skip"}
# Nearly even by entropy, and far from independent: most bars leave the band. Tokens of one
# sequence have looked at the same neighbours, so they are alike and choose alike. That is why a
# batch of six tokens can never show a collapse: with one sequence you have one sample, not six.
# The explorable asks the same of any size of batch.

# %% id="usage-explore" slideshow={"slide_type": "skip"}
EXPLORABLES["router"]()

# %% [markdown] id="capacity-text" slideshow={"slide_type": "skip"}
# ## 5 · Capacity: buffers of fixed size
#
# Compilers and networks like fixed shapes. So early systems gave each expert a buffer for
# $C = \lceil c \cdot N k / E \rceil$ slots with a *capacity factor* $c$; slots that come too late
# are **dropped**.

# %% id="capacity" slideshow={"slide_type": "skip"}
for N, E, k, factor in ((7, 8, 2, 1), (4, 4, 2, 4), (4096, 8, 2, 1.25)):
    print(f"N={N}, E={E}, k={k}, factor {factor}: capacity {expert_capacity(N, E, k, factor)}")
pads_first = torch.zeros(4, 1, dtype=torch.long)  # four tokens want expert 0; two are padding
real = torch.tensor([False, False, True, True])
for name, mask in (("padding counted (wrong)", None), ("padding left out", real)):
    kept = keep_within_capacity(pads_first, 4, capacity=2, real=mask)[:, 0]
    print(f"{name:24} tokens that find a place: {kept.nonzero().flatten().tolist()}")

# %% [markdown] id="capacity-after" slideshow={"slide_type": "skip"}
# Rounding *down* would give the first line room for only one token, and a factor may ask for more
# places than there are tokens (second line: four, not eight). Padding that stands in front takes
# the places of real tokens unless it is left out of the queue.
#
# A dropped slot is silent: no error, no NaN. What is left of such a token?

# %% id="dropped" slideshow={"slide_type": "skip"}
crowded = torch.randn(64, 32, generator=torch.Generator().manual_seed(5))
with torch.no_grad():
    logits = layer.gate(crowded)
    logits[:, :2] += torch.tensor([2.0, 1.0])  # two favourites
    g, c = layer.route(logits)
    kept = keep_within_capacity(c, 6, expert_capacity(64, 6, 2, 1.0))
    whole = combine_loop(layer.experts, crowded, g, c)
    served = lesson.within_capacity(layer.experts, crowded, g, c, kept)
slots = kept.sum(1)
print(f"dropped slots: {(~kept).sum().item()} of {kept.numel()}")
for n in (2, 1, 0):
    mine = slots == n
    lengths = served[mine].norm(dim=1) / whole[mine].norm(dim=1)
    print(f"{n} slots kept: {mine.sum().item():>2} tokens, output {lengths.mean():.2f} times "
          "as long as without a limit")  # fmt: skip
print("experts that serve every token all the same:", len(layer.shared))

# %% [markdown] id="dropped-after" slideshow={"slide_type": "skip"}
# A token over capacity does not simply "pass by the residual". It loses *that expert's slot*. Its
# other slots still act, and so do shared experts; only a token that loses all $k$ in a layer
# without shared experts is left with the residual alone.

# %% [markdown] id="drops-text" slideshow={"slide_type": "slide"}
# ### How much is dropped?
#
# Two kinds of router: one whose tokens choose evenly and independently, and one with a *skew*,
# where the log odds of an expert are normal with standard deviation 1. Means over several seeds.

# %% id="drops" tags=["output-only"]
shapes = ((4096, 8, 2, 30), (256, 8, 2, 30), (4096, 128, 8, 4), (4096, 256, 8, 4))
factors = (1.0, 1.25, 2.0)
print(f"{'':24}{'even':^23} {'skewed':^23}")
print(f"{'capacity factor':24}" + " ".join(f"{c:>7}" for c in 2 * factors))
for N, E, k, seeds in shapes:
    cells = []
    for skew in (0.0, 1.0):
        draws = [lesson.draw_choices(N, E, k, skew, seed) for seed in range(seeds)]
        loads = [lesson.load_of(draw, E) for draw in draws]
        for factor in factors:
            C = expert_capacity(N, E, k, factor)
            cells.append(sum(lesson.dropped_share(load, C) for load in loads) / seeds)
    print(f"N={N:<5} E={E:<4} k={k:<4}   " + " ".join(f"{s:>7.1%}" for s in cells))

# %% [markdown] id="drops-after"
# A capacity factor of 1 is the *average* demand, not an even distribution. Even a perfectly fair
# router drops a little, because chance alone fills some buffers and leaves others with holes; more
# so for small batches (the second line). A skewed one drops about a third, and doubling the
# buffers does not always save it. What is not dropped is padded: the number of places empty is the
# other side of the same coin.

# %% id="capacity-explore" slideshow={"slide_type": "skip"}
EXPLORABLES["moe_capacity"]()

# %% [markdown] id="capacity-notes" slideshow={"slide_type": "notes"}
# **4 minutes.** Set the skew to 0 and the factor to 1: ask why anything is dropped at all. Then
# lower N to 64. Dropless kernels (section 3) made this trade disappear on one machine; across
# machines buffers remain.

# %% [markdown] id="exercise-capacity-text" slideshow={"slide_type": "skip"}
# ### Your turn: who gets a place?


# %% id="exercise-capacity" tags=["exercise:capacity"] slideshow={"slide_type": "skip"}
def within_capacity(chosen, n_experts, capacity, real):
    """chosen (N, k) to a mask (N, k): True where the slot finds a place at its expert."""
    # Each expert has `capacity` places. Tokens are served in order, each its k choices in order.
    # Where real (N,) is False the token is padding: it takes no place and gets none.
    # A slot that comes too late is dropped; the token's other slots still stand.
    ...


within_capacity = check("capacity", within_capacity).use

# %% [markdown] id="fine-text" slideshow={"slide_type": "slide"}
# ## 6 · Finer experts, shared experts
#
# Cut each expert into $m$ thinner ones and let a token take $m$ times as many. Stored and active
# hidden units stay the same; the number of *sets of experts* a token can be sent to explodes
# (DeepSeekMoE, arXiv 2401.06066).

# %% id="fine"
print(f"the paper's example: C(16, 2) = {math.comb(16, 2)}")
print(f"each expert cut into 4: C(64, 8) = {math.comb(64, 8):,}")
for E, k in ((8, 2), (32, 4), (128, 4), (128, 8), (256, 8), (384, 8), (512, 10)):
    n = math.comb(E, k)
    print(f"C({E}, {k}) = {n:,}" if n < 1e9 else f"C({E}, {k}) = {n:.2e}")
print(f"8 x 8192 = {8 * 8192:,} hidden units, 256 x 2048 = {256 * 2048:,}: not one budget")

# %% [markdown] id="fine-notes" slideshow={"slide_type": "notes"}
# **3 minutes.** Ask what stays the same when an expert is cut (units stored, units active) and
# what grows (choices, router logits, and the number of small products to launch).

# %% [markdown] id="fine-after" slideshow={"slide_type": "skip"}
# The last line is a warning. Fine-grained experts are often pictured as "8 wide ones against `256`
# narrow ones". That picture compares two budgets, one eight times the other. The fair comparison
# cuts the *same* units finer.
#
# More choices are no proof of quality, and there is a counter-trend: gpt-oss, Mistral Large 3 and
# Trinity take only 4 experts a token and keep them wide, since larger products run more
# efficiently.

# %% id="fine-explore" slideshow={"slide_type": "skip"}
EXPLORABLES["moe_combinations"]()

# %% [markdown] id="shared-text" slideshow={"slide_type": "skip"}
# ### Shared experts: in or out?
#
# The idea: what every token needs should not be learnt $E$ times over, so one expert is always on.
# Published models disagree.

# %% id="shared" slideshow={"slide_type": "skip"}
sparse = [m for m in MODELS if m.n_experts]
with_shared = [m.name for m in sparse if m.n_shared_experts]
without = [m.name for m in sparse if m.n_shared_experts == 0]
print(f"with a shared path ({len(with_shared)}):", ", ".join(with_shared))
print(f"without ({len(without)}):", ", ".join(without))
dense_first = [f"{m.name} {m.first_k_dense}" for m in sparse if m.first_k_dense]
print("dense layers first:", ", ".join(dense_first))
d, narrow, width = 4096, 1024, 2048  # experts behind a projection, as in Nemotron 3 Super
print(f"one gated expert of {width} units: {3 * d * width:,} weights on {d} channels, "
      f"{3 * narrow * width:,} on {narrow}")  # fmt: skip

# %% [markdown] id="shared-after" slideshow={"slide_type": "skip"}
# Qwen1.5-MoE had a shared expert, Qwen3 has none (a developer's public answer: no significant gain
# was seen, and inference gets harder), Qwen3-Next has one again. The question is contested. So is
# the reason for the dense first layers: that early features need to be stable is an argument, not
# a proof. Llama 4 makes every *second* layer dense instead.
#
# The last line is a third variant, *latent experts*: project the stream down once, run the experts
# in the narrow space, project back. Each expert then costs a fraction, so one can afford more of
# them.

# %% [markdown] id="count-text" slideshow={"slide_type": "skip"}
# ## 7 · Count: stored and active
#
# **Active = everything, with the $E$ routed experts replaced by $k$.** Attention, embeddings,
# norms, router, dense layers and shared experts meet every token and count in full.

# %% id="count" slideshow={"slide_type": "skip"}
small = Config(vocab_size=100, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_head=4,
               n_experts=4, n_experts_active=2, d_expert=32, first_k_dense=0,
               attention=GQA(qk_norm=False))  # fmt: skip
c = count_parameters(small)
built = sum(p.numel() for p in ModernDecoder(small).parameters())
print(f"total {c.total:,}, as built: {c.total == built}")
print(f"active {c.active:,}, by the shortcut total k / E (wrong): {c.total * 2 // 4:,}")
print(f"active without the shared expert (forgotten): {c.active - c.shared:,}")

# %% [markdown] id="real-text" slideshow={"slide_type": "slide"}
# ### Published models, recounted from their sizes
#
# The left numbers are the makers' own, rounded as they round. The right ones are counted by the
# library from the published configuration alone.

# %% id="real" tags=["output-only"]
heads = ("experts", "published", "counted", "active", "- embed.", "share")
print(f"{'':17}" + "".join(f"{head:>12}" for head in heads))
names = ("DeepSeek-V3", "Kimi-K2", "GLM-4.5", "Qwen3-235B-A22B", "Qwen3-30B-A3B", "gpt-oss-120b",
         "gpt-oss-20b", "Llama-4-Maverick", "MiniMax-M2", "Mixtral-8x7B")  # fmt: skip
for m in map(published, names):
    c = count_published(m)
    counts = [f"{n / 1e9:.2f}" for n in (c.total, c.active, c.active - c.embedding)]
    row = (f"{m.n_experts_active} of {m.n_experts}", f"{m.total:g} / {m.active:g}", *counts,
           f"{c.active / c.total:.1%}")  # fmt: skip
    print(f"{m.name:17}" + "".join(f"{value:>12}" for value in row))

# %% [markdown] id="real-after" slideshow={"slide_type": "skip"}
# The column "- embed." leaves out the input embedding, which is looked up and not multiplied. Some
# makers count it as active and some do not: gpt-oss-20b is published with `3.6` active billions,
# which fits `3.61` and not `4.19`. **A count without this remark is not reproducible.**
#
# Biases matter at this precision too. Without any, gpt-oss comes out a little smaller:

# %% id="real-biases" slideshow={"slide_type": "skip"}
from dataclasses import replace

v3, count = published("DeepSeek-V3"), count_published(published("DeepSeek-V3"))
print(f"DeepSeek-V3: routed experts {count.routed / count.total:.1%} of all weights, one of them "
      f"{3 * v3.d_model * v3.d_expert / 1e6:.2f} M; attention "
      f"{count.attention / v3.n_layers / 1e6:.1f} M a layer")  # fmt: skip
for name in ("gpt-oss-120b", "gpt-oss-20b"):
    model_, bare = published(name), replace(published(name), biases=())
    totals = [count_published(m).total / 1e9 for m in (model_, bare)]
    print(f"{name}: {totals[0]:.2f} B with biases, {totals[1]:.2f} B without")
kimi = published("Kimi-K2")
print(f"Kimi-K2: published {kimi.total:g}, counted {count_published(kimi).total / 1e9:.1f}")
print(f"DeepSeek-V3, from the rounded figures: 37 / 671 = {37 / 671:.2%}")

# %% [markdown] id="count-wrong-text" slideshow={"slide_type": "skip"}
# ### The tempting shortcut
#
# "8 of `256` experts are active, so about `3.125%` of the model is." The fraction of *experts* is
# right and the fraction of *weights* is not:

# %% id="count-wrong" slideshow={"slide_type": "skip"}
for name in ("DeepSeek-V3", "Qwen3-235B-A22B", "Mixtral-8x7B"):
    m, c = published(name), count_published(published(name))
    naive = m.n_experts_active / m.n_experts
    print(f"{name:16} k / E = {naive:>7.3%}, active {c.active / c.total:>5.1%}; the shortcut "
          f"says {c.total * naive / 1e9:.1f} B, not {c.active / 1e9:.1f} B")  # fmt: skip

# %% [markdown] id="count-notes" slideshow={"slide_type": "notes"}
# **6 minutes.** MiniMax-M2 is often quoted with an active share of three digits. Its published
# figures are rounded to `10` and `230` billions, so only the first digit and a half are known. Ask
# what fits on a laptop: total decides, not active.

# %% id="count-explore" slideshow={"slide_type": "skip"}
EXPLORABLES["moe_parameters"]()

# %% [markdown] id="memory-text" slideshow={"slide_type": "slide"}
# ### Does it save memory?
#
# **No.** It saves compute and, for one token, bytes read. All experts must be stored, since the
# next token may want any of them.

# %% id="memory"
for name in ("Llama-3-8B", "Qwen3-30B-A3B", "Mixtral-8x7B", "DeepSeek-V3"):
    c = count_published(published(name))
    print(f"{name:14} in bf16: to store {2 * c.total / 2**30:>8,.1f} GiB, met by one token "
          f"{2 * c.active / 2**30:>5,.1f} GiB")  # fmt: skip


def experts_met(tokens, E=256, k=8):
    """Expected share of a layer's experts that at least one of the tokens needs, if even."""
    return 1 - (1 - k / E) ** tokens


print("experts of a layer that a batch needs:",
      ", ".join(f"{n} tokens {experts_met(n):.0%}" for n in (1, 8, 32, 128)))  # fmt: skip

# %% [markdown] id="memory-notes" slideshow={"slide_type": "notes"}
# **3 minutes.** The most common wrong sentence about these models is that they need less memory.

# %% [markdown] id="memory-after" slideshow={"slide_type": "skip"}
# The last line is why serving large mixtures wants large batches: a single token reads few
# experts, but a batch soon reads all of them, and only many tokens a batch pay for that.

# %% [markdown] id="models-text" slideshow={"slide_type": "skip"}
# ### The landscape
#
# Each bubble is a model; its area is what it stores, its shade the active share. Coarse experts
# stand on the left, fine-grained ones low on the right.

# %% id="models" slideshow={"slide_type": "skip"}
shown = ("Mixtral-8x7B", "Mixtral-8x22B", "OLMoE-1B-7B", "gpt-oss-20b", "gpt-oss-120b",
         "Llama-4-Maverick", "Qwen3-235B-A22B", "DeepSeek-V3", "Kimi-K2", "GLM-4.5",
         "Mistral-Large-3", "Trinity-Large", "Qwen3-Next-80B-A3B")  # fmt: skip
rows = [(m.name.split("-A")[0], m.n_experts, m.d_expert / m.d_model, m.total, m.active / m.total)
        for m in map(published, shown)]  # fmt: skip
fig, ax = theme.figure(12, 5.2)
places = dict.fromkeys(("Mixtral-8x7B", "Mixtral-8x22B", "Qwen3-235B", "Qwen3-Next-80B"), "right")
places |= dict.fromkeys(("GLM-4.5", "DeepSeek-V3", "Kimi-K2"), "below")
figures.draw_models(rows, ax, places)
theme.save(fig, "12_models")
widest, finest = max(rows, key=lambda r: r[2]), min(rows, key=lambda r: r[2])
theme.show(
    fig,
    alt="Bubbles of published models by number of experts and relative width of an expert: few "
    "wide experts on the upper left, hundreds of narrow ones on the lower right.",
    summary=f"widest experts: {widest[0]}, {widest[2]:.2f} of the stream; finest: {finest[0]}, "
    f"{finest[2]:.2f}",
)

# %% id="models-explore" slideshow={"slide_type": "skip"}
EXPLORABLES["moe_models"]()

# %% [markdown] id="smol-text" slideshow={"slide_type": "slide"}
# ## 8 · In a real model: is a dense layer secretly sparse?
#
# SmolLM2-135M-Instruct (Hugging Face, Apache-2.0, arXiv 2502.02737) is dense: every token runs all
# `1536` hidden units of every SwiGLU. A SwiGLU is a **sum over its hidden units**, so we can cut
# it into $E$ experts of equal width after the fact, and their sum is the layer exactly. How few of
# them does a token need?

# %% id="smol-load" tags=["output-only"]
from course_lib.zoo.smollm2 import load_smollm2

smol, tokenizer = load_smollm2()
TEXT = (
    "The water cycle has no beginning. Rain falls on the hills, runs into streams, and the streams "
    "join to form a river that carries the water back to the sea. On the way some of it sinks into "
    "the ground, where plants drink it through their roots. The sun warms the sea, and part of its "
    "water rises into the air as vapour."
)
ids = torch.tensor([tokenizer.encode(TEXT)])
ffn, seen = smol.blocks[15].ffn, {}
hook = ffn.register_forward_pre_hook(lambda module, args: seen.update(x=args[0]))
with torch.no_grad():
    dense_loss = next_token_loss(smol(ids)[0], ids).item()
    hook.remove()
    y15 = ffn(seen["x"])
    pieces = lesson.TopKOfSwiGLU(ffn, experts=12, k=12)(seen["x"])
print(f"{ids.shape[1]} tokens, loss {dense_loss:.3f} nats a token")
print(f"{len(smol.blocks)} layers of {ffn.w_down.in_features} hidden units")
print("12 experts, all running = the dense layer:", torch.allclose(pieces, y15, atol=1e-3))

# %% [markdown] id="smol-one-text" slideshow={"slide_type": "skip"}
# An **oracle** now keeps, for each token, the $k$ experts whose contribution to the output is
# longest. It is no router: it knows all contributions before it chooses. So it bounds from above
# what a router of that kind of cut could do. We compare it with a *fixed* set, the same experts
# for all tokens.


# %% id="smol-one" tags=["output-only"]
@torch.no_grad()
def error_of(experts, share, choice="largest"):
    kept = lesson.TopKOfSwiGLU(ffn, experts, round(experts * share), choice)(seen["x"])
    return ((kept - y15).norm() / y15.norm()).item()


shares = (1 / 12, 1 / 4, 1 / 2, 3 / 4)
cuts = {"12 experts": (12, "largest"), "192 experts": (192, "largest"),
        "1536 experts": (1536, "largest"), "192, a fixed set": (192, "fixed")}  # fmt: skip
errors = {name: {s: error_of(E, s, choice) for s in shares} for name, (E, choice) in cuts.items()}
print(f"{'relative error, running':24}" + "".join(f"{s:>8.0%}" for s in shares))
for name, curve in errors.items():
    print(f"{name:24}" + "".join(f"{e:>8.3f}" for e in curve.values()))


# %% [markdown] id="smol-all-text" slideshow={"slide_type": "subslide"}
# ### The whole model, cut
#
# Now all layers are cut at once, and the loss is measured on the same text.


# %% id="smol-all"
def loss_of(experts, choice, share):
    cut = lesson.cut_into_experts(smol, range(30), experts, round(experts * share), choice)
    with torch.no_grad(), cut:
        return next_token_loss(smol(ids)[0], ids).item()


losses = {name: {s: loss_of(*cut, s) for s in (1 / 4, 1 / 2)} for name, cut in cuts.items()}
fig, axes = theme.figure(12, 3.5, ncols=2)
with_dense = {name: curve | {1.0: dense_loss} for name, curve in losses.items()}
figures.draw_kept({"error": errors, "loss": with_dense}, axes, dense_loss)
theme.save(fig, "12_smollm2_cut")
rows = [
    f"{n:18}" + ", ".join(f"{s:.0%} run: {v:.2f}" for s, v in c.items()) for n, c in losses.items()
]
theme.show(
    fig,
    alt="The finer the cut, the less is lost at the same share of running units. Single units "
    "chosen for each token lose almost nothing; wide experts lose much, and so does a fixed set.",
    summary="all 30 layers cut; nats a token\n" + "\n".join(rows) + f"\ndense {dense_loss:.2f}",
)

# %% [markdown] id="smol-after"
# **Granularity decides.** With a quarter of the units running in every layer, twelve wide experts
# ruin the model, while `1536` experts of one unit each, chosen for each token, lose nothing that
# this text shows. The dense layer *is* sparse, unit by unit and token by token; but its busy units
# are scattered, because nothing in training asked them to lie together. Neighbouring units share a
# number and no task.

# %% [markdown] id="smol-limits" slideshow={"slide_type": "skip"}
# And the choice must depend on the token: the fixed set loses far more than the oracle of the same
# cut.
#
# Do not read this as a speed-up: the oracle computes everything first. A real mixture of experts
# is *trained* so that useful units stand together and a small matrix can tell which ones will be
# needed.

# %% [markdown] id="smol-notes" slideshow={"slide_type": "notes"}
# **5 minutes.** Ask for a guess first: half of the hidden units removed in every layer, by how
# much does the loss rise? Then show the three curves. One seed, one short text: the ordering is
# the finding, not the third digit.

# %% [markdown] id="takeaways" slideshow={"slide_type": "slide"}
# ## Key takeaways
#
# * Weights stored grow with $E$, work for a token with $k$. **Storage is never saved.**
# * Several routing conventions are in use. Softmax over the selected equals a renormalised full
#   softmax; at $k = 1$ every normalised form gives the router
#   *no* task gradient.
# * A selection bias steers the choice and stays out of the weights.
# * In the balance loss, say whether $f$ counts selections a token (even use costs $\alpha k$) or
#   slots ($\alpha$). Only $P$ carries a gradient; the loss is a surrogate.
# * Capacity trades dropped slots against empty places. A dropped slot is not a lost token.
# * Finer experts allow more combinations at one budget; shared experts are an open question.
# * The active share is not $k / E$: attention, embeddings, shared and dense parts count in full.

# %% [markdown] id="takeaways-notes" slideshow={"slide_type": "notes"}
# **2 minutes.** End with the first question: what does one token meet, and what must be stored?

# %% [markdown] id="check" slideshow={"slide_type": "skip"}
# ## Self-check
#
# Answer first, then open: answers 1, 3, 4 and 5 are computed by the folded cells below (click
# their bars).
#
# **1.** A model has `128` routed experts of `100` M weights and uses 8. How many expert weights
# are stored, how many active? Why does no small GPU run it?
#
# **2.** Counting choices has no gradient. Why does $\sum_e f_e P_e$ have one, and where does it
# point?
#
# **3.** What is the task gradient of a top-1 router with a softmax over the selected expert?
#
# **4.** Recount Qwen3-30B-A3B from its configuration.
#
# **5.** In DeepSeek-V3, 8 of `256` experts run. Which fraction of the experts is that, which
# fraction of the weights is active, and why do they differ?

# %% id="check-1" jupyter={"outputs_hidden": true, "source_hidden": true} slideshow={"slide_type": "skip"}
E, k, size = 128, 8, 100e6
print(f"1. stored {E * size / 1e9:.1f} B, active {k * size / 1e9:.1f} B; any token may choose any")
print(f"   expert, so all must be kept: {2 * E * size / 2**30:.1f} GiB in bf16")

# %% [markdown] id="check-2" slideshow={"slide_type": "skip"}
# <details><summary>2. Where does the gradient point?</summary>
#
# Only $P$ carries the gradient; $f$ weighs it:
# $\partial/\partial z \sum_e f_e P_e = \sum_e f_e\, \partial P_e/\partial z$. Descent takes
# probability from experts with a large $f_e$ and gives it to those with a small one. See the cell
# `balance-gradient`.
#
# </details>

# %% id="check-3" jupyter={"outputs_hidden": true, "source_hidden": true} slideshow={"slide_type": "skip"}
z = torch.randn(5, 7, requires_grad=True)
route(z, 1)[0].square().sum().backward()
print("3. exactly zero:", not z.grad.any(), "- the only weight is 1 whatever the logits are")

# %% id="check-4" jupyter={"outputs_hidden": true, "source_hidden": true} slideshow={"slide_type": "skip"}
L, d, V, H, K, h, E, k, width = 48, 2048, 151936, 32, 4, 128, 128, 8, 768
attention = 2 * d * H * h + 2 * d * K * h + 2 * h  # Q and O, K and V, two QK-Norm gains
rest = L * (attention + 2 * d + d * E) + d + 2 * V * d  # norms, router, final norm, embedding, head
expert = 3 * d * width
total, active = rest + L * E * expert, rest + L * k * expert
counted = count_published(published("Qwen3-30B-A3B"))
print(f"4. total {total:,}, active {active:,}: {total / 1e9:.2f} B and {active / 1e9:.2f} B")
print("   as the library counts:", (total, active) == (counted.total, counted.active))

# %% id="check-5" jupyter={"outputs_hidden": true, "source_hidden": true} slideshow={"slide_type": "skip"}
other = count.active - count.routed_active
print(
    f"5. {8 / 256:.3%} of the experts, {count.active / count.total:.1%} of the weights: attention,"
)
print(f"   shared expert, dense layers, embeddings and router are {other / 1e9:.1f} B, all active")

# %% [markdown] id="sources" slideshow={"slide_type": "skip"}
# ## Sources
#
# Sparsely gated mixtures: Shazeer et al., arXiv 1701.06538 · GShard (capacity, top-2): 2006.16668
# · Switch (top-1, balance loss): 2101.03961 · DeepSpeed-MoE: 2201.05596 · ST-MoE (router z-loss):
# 2202.08906 · Expert choice: 2202.09368 · MegaBlocks (dropless): 2211.15841 · Mixtral: 2401.04088
# · DeepSeekMoE (fine-grained, shared): 2401.06066 · Loss-free balancing: 2408.15664 · DeepSeek-V3:
# 2412.19437 · Qwen3: 2505.09388 · Kimi K2: 2507.20534 · GLM-4.5: 2508.06471 · SmolLM2: 2502.02737.
# Sizes of published models: `course_lib/zoo/configs.py`, each row with how it was read.
#
# **Next:** module 13 trains a whole decoder, balance loss included.
