"""Explorables of module 12: routing, balance, capacity, and what experts cost."""

import math

import numpy as np
import torch

from course_lib.model import Config, Router, expert_capacity, route
from course_lib.model.checks import require
from course_lib.teaching.explore import Choice, Explorable, Slider, Toggle
from course_lib.teaching.lessons.moe import draw_choices, dropped_share, evenness, load_of, toy_run
from course_lib.teaching.panels import Bars, Heat, Lines, Note
from course_lib.zoo.configs import MODELS, count_published, published
from course_lib.zoo.counts import ParameterCount, count_parameters

ZERO = 1e-6  # a gradient below it is rounding


# --- routing conventions told apart by gradient ---------------------------------------------

CONVENTIONS = {
    "softmax of chosen": Router("softmax_selected"),
    "softmax of all": Router("softmax_all"),
    "renormalised softmax": Router("softmax_renormalized"),
    "renormalised sigmoid": Router("sigmoid"),
    "plain sigmoid": Router("sigmoid", normalize=False),
}
LOGITS = ("z0", "z1", "z2", "z3")


def compute_conventions(k: int, z0: float, z1: float, z2: float, z3: float, bias: float) -> dict:
    weights, slopes, chosen = [], [], []
    for router in CONVENTIONS.values():
        logits = torch.tensor([[z0, z1, z2, z3]], requires_grad=True)
        weight, index = route(logits, k, router, torch.tensor([0.0, 0.0, 0.0, bias]))
        first = weight[0, 0]  # of the expert that was ranked first
        (slope,) = torch.autograd.grad(first, logits, allow_unused=True, materialize_grads=True)
        weights.append(torch.zeros(4).scatter(0, index[0], weight[0].detach()))
        slopes.append(slope[0])
        chosen.append(sorted(index[0].tolist()))
    shown = {"weights": torch.stack(weights).numpy(), "slopes": torch.stack(slopes).numpy()}
    return shown | {"chosen": chosen}


def dead(data) -> list[str]:
    """The conventions whose first weight does not react to any logit."""
    quiet = np.abs(data["slopes"]).max(-1) < ZERO
    return [name for name, none in zip(CONVENTIONS, quiet, strict=True) if none]


def view_conventions(data, k):
    rows = dict(yticks=list(CONVENTIONS), xticks=LOGITS, xlabel="expert", fmt="{:.3f}")
    silent = len(dead(data))
    found = f"{silent} of {len(CONVENTIONS)} dead" if silent else "none is dead"
    return [
        Heat(data["weights"], title=f"Weights of the top {k}", limits=(0, 1), role="router",
             hidden=data["weights"] == 0, hidden_label="not chosen", **rows),
        Heat(data["slopes"], title=f"Slope of the first weight: {found}", scale="diverging",
             limits=(-0.3, 0.3), **rows),
    ]  # fmt: skip


def summary_conventions(data, k):
    sums = ", ".join(f"{row.sum():.3f}" for row in data["weights"])
    silent = ", ".join(dead(data)) or "none"
    return f"top {k}; weights sum to {sums}; no gradient: {silent}"


def alt_conventions(data, k):
    silent = dead(data)
    if silent:
        return f"At k = {k} the first weight has no gradient with {' or '.join(silent)}."
    return f"At k = {k} the first weight of all conventions reacts to the logits."


def conventions_explorable() -> Explorable:
    """Five routers on the same four logits: weights, and the gradient of the first one."""
    logit = dict(low=-4.0, high=4.0, step=0.1)
    starts = dict(zip(LOGITS, (2.0, 0.0, -1.0, -1.5), strict=True))
    return Explorable(
        "moe_conventions",
        compute_conventions,
        view_conventions,
        summary_conventions,
        controls=dict(
            k=Slider(1, 1, 4, label="experts a token (k)"),
            **{name: Slider(value, label=f"logit {name}", **logit)
               for name, value in starts.items()},
            bias=Slider(0.0, 0.0, 4.0, step=0.1, label="selection bias of expert 3",
                        help="added for the choice, never in the weights"),
        ),
        title="Which router still learns?",
        alt=alt_conventions,
        code=lambda k: f"route(logits, k={k}, router=Router('softmax_all'))",
        invariants=lambda data, k: [
            ("k experts each", all(len(c) == k == len(set(c)) for c in data["chosen"])),
            ("the normalised ones sum to 1",
             bool(np.allclose(data["weights"].sum(-1)[[0, 2, 3]], 1, atol=1e-5))),
            ("softmax of all sums to at most 1", data["weights"][1].sum() <= 1 + 1e-5),
            ("chosen = renormalised",
             data["chosen"][0] != data["chosen"][2]
             or bool(np.allclose(data["weights"][0], data["weights"][2], atol=1e-5))),
            ("a softmax does not care for a shift",
             bool(np.abs(data["slopes"][:3].sum(-1)).max() < 1e-5)),
        ],
        height=330,
    )  # fmt: skip


# --- total and active ---------------------------------------------------------------------------

ROLES = {"embedding": "stream", "attention": "q", "dense": "norm", "shared": "shared",
         "routed": "experts"}  # fmt: skip


def parts_of(count: ParameterCount, active: bool) -> list[int]:
    """Embedding and head, attention and norms, dense layers, shared, routed and router."""
    routed = count.routed_active if active else count.routed
    return [
        count.embedding + count.head,
        count.attention + count.norms,
        count.dense_ffn,
        count.shared,
        routed + count.router,
    ]


def moe_config(E: int, k: int, shared: int, width: int, dense: int, L: int, d: int) -> Config:
    require(k <= E, f"k={k} exceeds E={E} experts.", f"Choose k from 1 to {E}.")
    require(dense <= L, f"dense first={dense} exceeds {L} layers.", f"Choose 0 to {L}.")
    return Config(
        vocab_size=32000, d_model=d, n_layers=L, n_heads=max(1, d // 128), d_head=128,
        n_kv_heads=max(1, d // 128), d_ff=4 * d, n_experts=E, n_experts_active=k,
        n_shared_experts=shared, d_expert=width, first_k_dense=dense, tied=False,
        router=Router("softmax_all"),
    )  # fmt: skip


def compute_parameters(E, k, shared, width, dense, L, d) -> ParameterCount:
    return count_parameters(moe_config(E, k, shared, width, dense, L, d))


def in_words(n: float) -> str:
    """12,345,678 as 12.3 M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if n >= size:
            return f"{n / size:.3g} {letter}"
    return f"{n:,.0f}"


def view_parameters(data: ParameterCount, E, k):
    stacked = np.array([parts_of(data, False), parts_of(data, True)]).T / 1e9
    share, naive = data.active / data.total, k / E
    return [
        Bars(stacked, ["stored", "active"], names=list(ROLES), roles=list(ROLES.values()),
             ylabel="billions of weights", fmt="compact", width=1.4,
             title=f"{in_words(data.active)} of {in_words(data.total)} meet a token"),
        Bars([100 * share, 100 * naive], ["active share", "k / E"], roles=["router", "stream"],
             ylabel="% of all weights", fmt="{:.1f}", limits=(0, 112),
             title="k / E is not the active share"),
    ]  # fmt: skip


def summary_parameters(data: ParameterCount, E, k):
    return (
        f"stored {data.total:,}, active {data.active:,} ({data.active / data.total:.2%}); "
        f"k / E = {k / E:.2%}; in bf16 {2 * data.total / 2**30:,.1f} GiB to keep"
    )


def parameters_explorable() -> Explorable:
    """How many weights a mixture of experts stores, and how many of them one token meets."""
    return Explorable(
        "moe_parameters",
        compute_parameters,
        view_parameters,
        summary_parameters,
        controls=dict(
            E=Slider(64, 2, 512, log=True, label="routed experts (E)"),
            k=Slider(2, 1, 16, label="experts a token (k)"),
            shared=Slider(1, 0, 2, label="shared experts"),
            width=Slider(1024, 64, 16384, log=True, label="expert width"),
            dense=Slider(1, 0, 6, label="dense layers first"),
            L=Slider(24, 6, 96, label="layers (L)"),
            d=Slider(2048, 256, 8192, log=True, label="stream width (D)"),
        ),
        title="What is stored, and what a token meets",
        alt=lambda data, E, k: f"{in_words(data.total)} weights are stored "
        f"and {in_words(data.active)} meet a token, {data.active / data.total:.1%}, "
        f"while k / E is {k / E:.1%}.",
        code=lambda E, k, shared, width, dense, L, d: (
            f"Config(d_model={d}, n_layers={L}, n_experts={E}, n_experts_active={k}, "
            f"n_shared_experts={shared}, d_expert={width}, first_k_dense={dense})"
        ),
        invariants=lambda data, E, k: [
            ("parts add up", sum(parts_of(data, False)) == data.total),
            ("active parts add up", sum(parts_of(data, True)) == data.active),
            ("the active share is at least k / E", data.active * E >= data.total * k),
        ],
    )  # fmt: skip


# --- combinations at one budget ---------------------------------------------------------------

CUTS = (1, 2, 4, 8, 16)


def compute_combinations(E: int, k: int, cut: int) -> dict:
    require(k <= E, f"k={k} exceeds E={E} experts.", f"Choose k from 1 to {E}.")
    return {
        "by_cut": [math.comb(m * E, m * k) for m in CUTS],
        "by_k": [math.comb(cut * E, j) for j in range(1, cut * E + 1)],
        "now": math.comb(cut * E, cut * k),
    }


def log10(n: int) -> float:
    """Also of whole numbers that no float holds."""
    return math.log10(n)


def with_digits(n: int) -> str:
    return f"{n:,}" if n < 10**15 else f"about 10^{log10(n):.1f}"


def view_combinations(data, E, k, cut, width):
    return [
        Bars([log10(n) for n in data["by_cut"]], [f"1/{m}" for m in CUTS],
             roles=["router" if m == cut else "stream" for m in CUTS], fmt="{:.1f}",
             xlabel="width of an expert, as a share of the coarse one",
             ylabel="log10 of the choices",
             title=f"{cut * E} experts, {cut * k} a token: {with_digits(data['now'])} choices"),
        Bars([E * width, k * width], ["stored", "active"], roles=["experts", "router"],
             ylabel="hidden units a layer", fmt="{:,.0f}", width=0.7,
             title=f"The budget stays: experts of {width // cut}"),
    ]  # fmt: skip


def combinations_explorable() -> Explorable:
    """How many sets of experts a token can be sent to when each expert is cut into finer ones."""
    return Explorable(
        "moe_combinations",
        compute_combinations,
        view_combinations,
        lambda data, E, k, cut: f"C({cut * E}, {cut * k}) = {with_digits(data['now'])}; "
        f"before the cut C({E}, {k}) = {with_digits(data['by_cut'][0])}",
        controls=dict(
            E=Slider(16, 2, 64, label="coarse experts (E)"),
            k=Slider(2, 1, 8, label="coarse experts a token (k)"),
            cut=Choice(4, CUTS, label="cut each expert into"),
            width=Slider(2048, 256, 16384, log=True, label="width of a coarse expert"),
        ),
        view_only=("width",),
        title="The same budget, more ways to combine it",
        alt=lambda data, E, k, cut: f"{cut * E} experts with {cut * k} a token allow "
        f"{with_digits(data['now'])} choices, {E} with {k} only {with_digits(data['by_cut'][0])}.",
        code=lambda E, k, cut: f"math.comb({cut * E}, {cut * k})",
        invariants=lambda data, E, k, cut: [
            ("finer is never fewer", data["by_cut"] == sorted(data["by_cut"])),
            ("both panels agree", data["by_k"][cut * k - 1] == data["now"]),
        ],
        height=330,
    )  # fmt: skip


# --- load over training ---------------------------------------------------------------------

WINDOW = 10  # steps in one column of the heat map


def compute_balance(alpha: float, gamma: float, start: float, seed: int) -> dict:
    run = toy_run(alpha, gamma, start, seed=seed)
    windows = run["loads"].reshape(-1, WINDOW, run["loads"].shape[1]).sum(1)
    return {
        "share": (windows / windows.sum(-1, keepdims=True)).T,
        "even": np.array([evenness(load) for load in windows]),
        "error": run["errors"].reshape(-1, WINDOW).mean(1),
        "bias": run["bias"],
    }


def view_balance(data):
    steps = WINDOW * (np.arange(len(data["even"])) + 1)
    first, last = data["even"][[0, -1]]
    return [
        Heat(data["share"], title=f"Share of the slots: evenness {first:.2f} → {last:.2f}",
             xlabel=f"training, {WINDOW} steps a column", ylabel="expert", limits=(0, 0.5),
             role="experts", yticks=range(len(data["share"])),
             xticks=[step if i % 3 == 2 else "" for i, step in enumerate(steps)]),
        Lines(steps, {"evenness of the load": data["even"],
                      "task error (relative)": data["error"] / data["error"][0]},
              xlabel="training step", limits=(0, 1.05),
              xlimits=(0, 1.05 * steps[-1]), roles=["router", "stream"],
              title=f"Task error at the end {data['error'][-1]:.2f}"),
    ]  # fmt: skip


def summary_balance(data, alpha, gamma, start):
    """Verdicts: what many steps of training end in is not equal to the digit on all machines."""
    even, learnt = data["even"][-1] > 0.95, data["error"][-1] < data["error"][0] / 2
    return (
        f"start bias {start:g}, alpha {alpha:g}, gamma {gamma:g}: ends even (above 0.95): {even}, "
        f"task error halved: {learnt}"
    )


def balance_explorable() -> Explorable:
    """A small router and its experts, trained anew at each move of a slider."""
    return Explorable(
        "moe_balance",
        compute_balance,
        view_balance,
        summary_balance,
        controls=dict(
            alpha=Slider(0.0, values=(0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
                         label="balance loss (alpha)"),
            gamma=Slider(0.0, values=(0.0, 0.001, 0.002, 0.005, 0.01),
                         label="bias step (gamma)"),
            start=Slider(3.0, 0.0, 4.0, step=0.5, label="start bias of expert 0"),
            seed=Slider(0, 0, 9, label="seed"),
        ),
        title="Does an unbalanced router recover?",
        alt=lambda data, alpha, gamma: f"With alpha {alpha:g} and gamma {gamma:g} the evenness of "
        f"the load goes from {data['even'][0]:.2f} to {data['even'][-1]:.2f}.",
        code=lambda alpha, gamma, start, seed: (
            f"toy_run(alpha={alpha}, gamma={gamma}, start={start}, seed={seed})"
        ),
        invariants=lambda data: [
            ("shares sum to 1", bool(np.allclose(data["share"].sum(0), 1))),
            ("no expert has more than 1 / k", data["share"].max() <= 0.5 + 1e-9),
            ("finite", bool(np.isfinite(data["error"]).all())),
        ],
        height=330,
    )  # fmt: skip


# --- capacity -------------------------------------------------------------------------------


def compute_capacity(N: int, E: int, k: int, skew: float, seed: int) -> np.ndarray:
    return load_of(draw_choices(N, E, k, skew, seed), E)


FACTORS = np.arange(1.0, 2.01, 0.05)


def seats(data, N, E, k, factor) -> tuple[int, float, float]:
    """Capacity, share of slots dropped, share of places empty."""
    capacity = expert_capacity(N, E, k, factor)
    empty = (capacity - data).clamp(min=0).sum().item() / (capacity * E)
    return capacity, dropped_share(data, capacity), empty


def view_capacity(data, N, E, k, factor):
    capacity, dropped, empty = seats(data, N, E, k, factor)
    load, order = data.sort(descending=True)
    served, lost = load.clamp(max=capacity), (load - capacity).clamp(min=0)
    curves = np.array([seats(data, N, E, k, float(f))[1:] for f in FACTORS])
    return [
        Bars(np.stack([served, lost]), [str(e) if E <= 16 else "" for e in order.tolist()],
             names=["served", "dropped"], roles=["experts", "k"], reference=capacity,
             reference_label=f"capacity {capacity}", show_values=False, ylabel="slots",
             xlabel="experts, fullest first", width=1.3,
             title=f"{dropped:.1%} of the slots dropped, {empty:.1%} of the places empty"),
        Lines(FACTORS, {"slots dropped": 100 * curves[:, 0], "places empty": 100 * curves[:, 1]},
              xlabel="capacity factor", ylabel="%", roles=["k", "stream"], marks={"now": factor},
              limits=(0, max(60, 100 * curves.max())), title="One is traded for the other"),
    ]  # fmt: skip


def summary_capacity(data, N, E, k, factor):
    capacity, dropped, empty = seats(data, N, E, k, factor)
    return (
        f"N={N}, E={E}, k={k}: capacity {capacity}, dropped {dropped:.1%}, "
        f"empty {empty:.1%}, fullest expert {data.max().item()}"
    )


def capacity_explorable() -> Explorable:
    """Buffers of fixed size: what is dropped, and what stays empty."""
    return Explorable(
        "moe_capacity",
        compute_capacity,
        view_capacity,
        summary_capacity,
        controls=dict(
            factor=Slider(1.0, 1.0, 2.0, step=0.05, label="capacity factor"),
            skew=Slider(1.0, 0.0, 2.0, step=0.1, label="skew of the router",
                        help="standard deviation of the log odds of an expert"),
            N=Slider(4096, 64, 8192, log=True, label="tokens (N)"),
            E=Choice(8, (8, 16, 32, 64), label="experts (E)"),
            k=Slider(2, 1, 8, label="experts a token (k)"),
            seed=Slider(0, 0, 9, label="seed"),
        ),
        view_only=("factor",),
        title="How much room does an expert need?",
        alt=lambda data, N, E, k, factor: "With capacity factor "
        f"{factor:g}, {seats(data, N, E, k, factor)[1]:.1%} of the slots find no place.",
        code=lambda N, E, k, factor: f"expert_capacity({N}, {E}, {k}, {factor:g})",
        limit_bytes=lambda N, E: 16 * N * E,
        invariants=lambda data, N, E, k, factor: [
            ("each token has k slots", data.sum().item() == N * k),
            ("no expert twice for a token", data.max().item() <= N),
            ("dropped and served are all", balanced(data, N, E, k, factor)),
        ],
    )  # fmt: skip


def balanced(data, N, E, k, factor) -> bool:
    capacity, dropped, empty = seats(data, N, E, k, factor)
    served = capacity * E * (1 - empty)
    return math.isclose(served + dropped * N * k, N * k, rel_tol=1e-6)


# --- published models -----------------------------------------------------------------------

SPARSE = tuple(model.name for model in MODELS if model.n_experts and model.total)
QUANTITIES = {
    "active share, %": lambda m: 100 * m.active / m.total,
    "stored, billions": lambda m: m.total,
    "active, billions": lambda m: m.active,
    "k / E, %": lambda m: 100 * m.n_experts_active / m.n_experts,
    "log10 of the choices": lambda m: math.log10(math.comb(m.n_experts, m.n_experts_active)),
    "expert / stream width": lambda m: m.d_expert / m.d_model,
}


def compute_models(quantity: str, with_shared: bool) -> list:
    rows = [published(name) for name in SPARSE if published(name).active]
    if with_shared:
        rows = [m for m in rows if m.n_shared_experts]
    return sorted(((m.name, QUANTITIES[quantity](m)) for m in rows), key=lambda row: -row[1])


def describe(model) -> str:
    """The facts of one model, and the count where the library can make it."""
    lines = [
        f"{model.name}: {model.n_experts} experts, {model.n_experts_active} a token, "
        f"shared {model.n_shared_experts}",
        f"expert width {model.d_expert} at stream width {model.d_model}, {model.n_layers} layers, "
        f"{model.n_dense} dense",
        f"as published: {model.total:g} B stored, {model.active:g} B active",
    ]
    if model.beyond:
        lines.append(f"not counted: {model.beyond}")
    else:
        count = count_published(model)
        lines.append(
            f"counted: {count.total / 1e9:.2f} B stored, {count.active / 1e9:.2f} B active "
            f"({(count.active - count.embedding) / 1e9:.2f} without the input embedding)"
        )
    return "\n".join(lines + ([f"{model.tag}: {model.note}"] if model.note else []))


def in_two_columns(lines: list[str]) -> str:
    half = (len(lines) + 1) // 2
    right = lines[half:] + [""] * (2 * half - len(lines))
    return "\n".join(f"{x:26}{y}" for x, y in zip(lines[:half], right, strict=True))


def view_models(data, quantity, model):
    names = [name for name, _ in data]
    legend = [f"{i + 1:>2} {n}{' <' if n == model else ''}" for i, n in enumerate(names)]
    return [
        [
            Bars(
                [value for _, value in data],
                [str(i + 1) for i in range(len(names))],
                ylabel=quantity,
                fmt="{:.3g}",
                roles=["router" if name == model else "stream" for name in names],
                title=f"{quantity}: most in {names[0]}",
                width=1.5,
            ),
            Note(in_two_columns(legend)),
        ],
        [Note(describe(published(model)))],
    ]


def models_explorable() -> Explorable:
    """Real mixtures of experts side by side, and one of them counted."""
    return Explorable(
        "moe_models",
        compute_models,
        view_models,
        lambda data, quantity, model: f"{quantity}: {data[0][0]} {data[0][1]:.3g} to "
        f"{data[-1][0]} {data[-1][1]:.3g}; " + describe(published(model)).replace("\n", "; "),
        controls=dict(
            quantity=Choice("active share, %", tuple(QUANTITIES), label="compare by"),
            model=Choice("DeepSeek-V3", tuple(n for n in SPARSE if published(n).active),
                         label="look at"),
            with_shared=Toggle(False, label="only with shared experts"),
        ),
        view_only=("model",),
        title="Published mixtures of experts",
        alt=lambda data, quantity: f"{quantity} goes from {data[-1][1]:.3g} ({data[-1][0]}) to "
        f"{data[0][1]:.3g} ({data[0][0]}).",
        code=lambda model: f"count_published(published('{model}'))",
        invariants=lambda data: [
            ("sorted", [v for _, v in data] == sorted((v for _, v in data), reverse=True)),
            ("each once", len({n for n, _ in data}) == len(data)),
        ],
        height=420,
    )  # fmt: skip
