"""Explorables of module 05: what positions are, and what can be done to them."""

import math
import zlib
from functools import partial

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from course_lib.model import (
    NTK,
    Interpolation,
    Llama3,
    Rope,
    YaRN,
    alibi_bias,
    causal_mask,
    inverse_frequencies,
    scaled_frequencies,
)
from course_lib.model.checks import require
from course_lib.teaching.explore import Choice, Explorable, Slider, Text, Toggle
from course_lib.teaching.lessons.rope import sinusoid
from course_lib.teaching.lessons.rope_figures import clock_svg, draw_clocks
from course_lib.teaching.panels import Bars, Heat, Lines, Picture
from course_lib.teaching.theme import DPI, png_of

WIDTHS = (8, 16, 32, 64, 128, 256)
THETAS = (100, 1000, 10_000, 50_000, 100_000, 150_000, 500_000, 10**6, 5 * 10**6, 10**7, 10**8)
THETA = dict(values=THETAS, help="the base of the frequencies, rope_theta in a Config")


# --- words in another order -----------------------------------------------------------------

ORDERS = {
    "as written": lambda places: places,
    "first two swapped": lambda places: places[:2][::-1] + places[2:],
    "first and last swapped": lambda places: places[-1:] + places[1:-1] + places[:-1][:1],
    "backwards": lambda places: places[::-1],
}
MOST_WORDS, WORD_WIDTH = 8, 12


def word_vectors(words: list[str]) -> Tensor:
    """A vector for each word, the same for the same word; (T, 12)."""
    seeds = [zlib.crc32(word.lower().encode()) for word in words]
    draw = torch.Generator()
    return torch.stack([torch.randn(WORD_WIDTH, generator=draw.manual_seed(s)) for s in seeds])


def attend(x: Tensor, causal: bool) -> Tensor:
    scores = x @ x.T / math.sqrt(x.shape[-1])
    if causal:
        scores = scores.masked_fill(~causal_mask(len(x)), -torch.inf)
    return scores.softmax(-1) @ x


def compute_permutation(text: str, order: str, causal: bool, positions: bool) -> dict:
    words = text.split()[:MOST_WORDS]
    require(bool(words), f"text={text[:20]!r} has no word.", "Write some, up to eight are shown.")
    moved = torch.tensor(ORDERS[order](list(range(len(words)))))
    x = word_vectors(words)
    code = sinusoid(torch.arange(len(words)), WORD_WIDTH).float() if positions else 0
    before, after = attend(x + code, causal), attend(x[moved] + code, causal)
    undone = after[moved.argsort()]  # each word's output beside what it was before
    return {
        "words": words,
        "moved": [words[i] for i in moved],
        "before": before.numpy(),
        "after": after.numpy(),
        "change": (before - undone).abs().amax(-1).numpy(),
    }


def view_permutation(data, order, causal, positions):
    limit = max(np.abs(data["before"]).max(), np.abs(data["after"]).max())
    shared = dict(scale="diverging", limits=(-limit, limit), xlabel="channel", role="stream")
    largest = data["change"].max()
    found = "Rows only move" if largest < 1e-5 else "Outputs change with the place"
    return [
        [
            Heat(data["before"], title="output, as written", yticks=data["words"], **shared),
            Heat(data["after"], title=f"output, {order}", yticks=data["moved"], **shared),
        ],
        [
            Bars(
                np.where(data["change"] < 1e-5, 0, data["change"]),
                data["words"],
                title=f"{found}: largest change of a word's output {largest:.2f}",
                ylabel="change",
                role="scores",
                fmt="{:.2f}",
                limits=(0, max(1.0, 1.15 * float(largest))),
                height=0.7,
            )
        ],
    ]


def permutation_explorable() -> Explorable:
    """Reorder the words of a sentence under attention without or with positions. Module 05."""
    return Explorable(
        "permutation",
        compute_permutation,
        view_permutation,
        lambda data, order: (
            f"{len(data['words'])} words, {order}, largest change of a word's output "
            f"{data['change'].max():.3f}"
        ),
        controls=dict(
            text=Text("the dog bites the man", label="sentence", help="up to 8 words"),
            order=Choice("first two swapped", tuple(ORDERS), label="order"),
            causal=Toggle(False, label="causal mask", help="a word sees only earlier words"),
            positions=Toggle(False, label="add sinusoids", help="a code of the position"),
        ),
        title="Does attention notice the order of words?",
        alt=lambda data, order, causal, positions: (
            f"Order: {order}; {'causal' if causal else 'no'} mask, "
            f"{'sinusoids' if positions else 'no positions'}: the output of a word changes by at "
            f"most {data['change'].max():.2f}."
        ),
        code=lambda text, order: f"X[{ORDERS[order](list(range(len(text.split()[:MOST_WORDS]))))}]",
        invariants=lambda data, causal, positions: [
            ("without mask and positions only the rows move",
             causal or positions or bool(data["change"].max() < 1e-5)),
        ],
    )  # fmt: skip


# --- sinusoids ------------------------------------------------------------------------------


def compute_sinusoid(d: int, T: int, base: float, at: int) -> dict:
    codes = sinusoid(torch.arange(T), d, base)
    at = min(at, T - 1)
    return {"codes": codes.numpy(), "products": (codes @ codes[at]).numpy(), "at": at}


def view_sinusoid(data, d, T):
    half = d // 2
    return [
        [
            Heat(
                data["codes"].T,
                title="Each channel pair keeps its own time",
                xlabel="position (token)",
                ylabel="channel, fast to slow",
                scale="diverging",
                limits=(-1, 1),
                role="stream",
                pick={"x": "at"},
                height=1.3,
            )
        ],
        [
            Lines(
                np.arange(T),
                {f"code({data['at']}) · code(t)": data["products"]},
                title=f"Largest at its own position, where it is d / 2 = {half}",
                xlabel="position t (token)",
                ylabel="product",
                marks={f"position {data['at']}": data["at"]},
                roles=["scores"],
            )
        ],
    ]


def sinusoid_explorable() -> Explorable:
    """The sinusoidal codes of Vaswani et al. and their products. Module 05."""
    return Explorable(
        "sinusoids",
        compute_sinusoid,
        view_sinusoid,
        lambda data, d, T: (
            f"d={d}, T={T}, product with itself {data['products'][data['at']]:.1f}, "
            f"smallest {data['products'].min():.2f}"
        ),
        controls=dict(
            d=Slider(32, values=(4, 8, 16, 32, 64, 128, 256), label="width d", unit="channels"),
            T=Slider(128, 16, 1024, log=True, label="positions", unit="tokens"),
            base=Slider(10_000, label="base", values=(10, *THETAS)),
            at=Slider(40, 0, 1023, label="compare with position"),
        ),
        title="What a sinusoidal code looks like, and what its products know",
        alt=lambda data: (
            f"Striped heat map, fast stripes above slow ones; the product with position "
            f"{data['at']} is largest there."
        ),
        code=lambda d, T, base: f"sinusoid(torch.arange({T}), d={d}, base={base:g})",
        invariants=lambda data, d: [
            ("the product with itself is d / 2",
             abs(float(data["products"][data["at"]]) - d / 2) < 1e-9),
            ("no product is larger", bool(data["products"].max() <= d / 2 + 1e-9)),
        ],
    )  # fmt: skip


# --- the clock ------------------------------------------------------------------------------

FACES = 6


def compute_clock(query: int, key: int, theta: float, d: int) -> dict:
    freq = inverse_frequencies(d, theta).numpy()
    shown = np.unique(np.linspace(0, d // 2 - 1, min(FACES, d // 2)).round().astype(int))
    return {"freq": freq, "shown": shown, "cosines": np.cos((query - key) * freq)}


def faces_of(data, query: int, key: int) -> list[tuple[str, float, float]]:
    """A caption, the angle of the query's hand and that of the key's, for each face shown."""
    return [(f"pair {i}", query * data["freq"][i], key * data["freq"][i]) for i in data["shown"]]


def clock_png(faces) -> bytes:
    fig = Figure(figsize=(1.5 * len(faces), 1.8), dpi=DPI)
    draw_clocks(fig.add_axes((0, 0, 1, 1)), faces)
    return png_of(fig)


def view_clock(data, query, key):
    faces = faces_of(data, query, key)
    mean = data["cosines"].mean()
    return [
        [
            Picture(
                clock_svg(faces),
                partial(clock_png, faces),
                title="Hands of the query and of the key",
            )
        ],
        [
            Bars(
                data["cosines"],
                [str(i) for i in range(len(data["cosines"]))],
                title=f"Each pair adds the cosine of its angle: mean {mean:.3f} at distance "
                f"{query - key}",
                xlabel="pair, fast to slow",
                ylabel="cosine",
                role="scores",
                show_values=False,
                limits=(-1.05, 1.05),
            )
        ],
    ]


def clock_explorable() -> Explorable:
    """RoPE as hands that turn: only the angle between two hands enters a score. Module 05."""
    return Explorable(
        "clock",
        compute_clock,
        view_clock,
        lambda data, query, key: (
            f"query at {query}, key at {key}, distance {query - key}, fastest pair turned by "
            f"{query * data['freq'][0]:.2f} and {key * data['freq'][0]:.2f} rad, mean cosine "
            f"{data['cosines'].mean():.3f}"
        ),
        controls=dict(
            query=Slider(5, 0, 200, label="query at position"),
            key=Slider(3, 0, 200, label="key at position"),
            theta=Slider(10_000, label="theta", **THETA),
            d=Slider(16, values=WIDTHS, label="width of a head", unit="channels"),
        ),
        title="Move both: the hands turn. Move one: the score changes",
        alt=lambda data, query, key: (
            f"Clock faces from the fastest to the slowest pair with the hands of positions "
            f"{query} and {key}; the mean cosine of their angles is {data['cosines'].mean():.2f}."
        ),
        code=lambda theta, d: f"Config(rope_theta={theta:g}, d_head={d})",
        invariants=lambda data, query, key: [
            ("equal positions score 1", query != key or bool((data["cosines"] == 1).all())),
            ("a cosine stays within 1", bool((np.abs(data["cosines"]) <= 1).all())),
        ],
    )


# --- score against distance -----------------------------------------------------------------

CONTENTS = ("q = k", "random", "one pair")


def compute_score(content: str, theta: float, d: int, farthest: int, seed: int) -> dict:
    freq = inverse_frequencies(d, theta)
    draw = torch.Generator().manual_seed(seed)
    q, k = (torch.complex(*torch.randn(2, d // 2, generator=draw).double()) for _ in range(2))
    hands = q * k.conj() / (q.norm() * k.norm())
    if content != "random":
        hands = torch.full_like(hands, 1 / len(freq))
    if content == "one pair":
        freq, hands = freq[:1], torch.ones(1, dtype=hands.dtype)
    angles = torch.arange(farthest + 1, dtype=torch.float64)[:, None] * freq
    scores = (torch.polar(torch.ones_like(angles), angles) * hands).real.sum(-1)
    return {"scores": scores.numpy()}


NEAR, FAR = 64, 512  # steps: the first ones stand by themselves where there are very many


def view_score(data, farthest):
    scores = data["scores"]
    rises = np.diff(scores) > 0
    found = f"The score rises on {int(rises.sum())} of {farthest} steps away"
    if farthest <= FAR:
        return score_panel(scores, found, mark_rises=True)
    return [
        score_panel(scores[: NEAR + 1], f"The first {NEAR} steps", mark_rises=True),
        score_panel(scores, found, mark_rises=False, width=1.6),
    ]


def score_panel(scores: np.ndarray, title: str, mark_rises: bool, width: float = 1.0) -> Lines:
    rises = np.diff(scores) > 0
    rising = np.where(np.append(rises, False) | np.insert(rises, 0, False), scores, np.nan)
    marked = {"farther, yet higher": rising} if mark_rises and rises.any() else {}
    return Lines(
        np.arange(len(scores)),
        {"score": scores} | marked,
        title=title,
        xlabel="distance n - m (tokens)",
        ylabel="score over its largest",
        roles=["scores", "k"],
        limits=(-1.05, 1.05),
        width=width,
    )


def score_explorable() -> Explorable:
    """The score of one fixed query and key as the distance between them grows. Module 05."""
    return Explorable(
        "score against distance",
        compute_score,
        view_score,
        lambda data, farthest: (
            f"{data['scores'][0]:.2f} at distance 0, {data['scores'][-1]:.2f} at {farthest}, "
            f"rises on {int((np.diff(data['scores']) > 0).sum())} of {farthest} steps"
        ),
        controls=dict(
            content=Choice("q = k", CONTENTS, label="content"),
            theta=Slider(10_000, label="theta", **THETA),
            d=Slider(128, values=WIDTHS, label="width of a head", unit="channels"),
            farthest=Slider(128, 8, 4096, log=True, label="up to distance", unit="tokens"),
            seed=Slider(0, 0, 99, label="seed", help="of the random query and key"),
        ),
        title="Does a score fall with distance?",
        alt=lambda data, farthest: (
            f"A wavy curve that rises on {int((np.diff(data['scores']) > 0).sum())} of {farthest} "
            "steps away from the query."
        ),
        code=lambda theta, d: f"inverse_frequencies({d}, {theta})",
        disabled=lambda content: (
            ({} if content == "random" else {"seed": "only random content is drawn"})
            | ({"d": "one pair has two channels",
                "theta": "pair 0 turns by 1 rad whatever theta is"}
               if content == "one pair" else {})
        ),
        invariants=lambda data: [
            ("within 1", bool((np.abs(data["scores"]) <= 1 + 1e-9).all())),
        ],
        height=370,
    )  # fmt: skip


# --- the ladder of wavelengths --------------------------------------------------------------

SCALINGS = {
    "none": lambda factor, length: None,
    "interpolation": lambda factor, length: Interpolation(factor),
    "NTK": lambda factor, length: NTK(factor),
    "YaRN": lambda factor, length: YaRN(factor, length),
    "Llama 3": lambda factor, length: Llama3(factor, original_length=length),
}
PARTS = ("full", "partial", "proportional")


def chosen_rope(part: str, fraction: float, scaling: str, factor: float, length: int) -> Rope:
    return Rope(
        fraction=1.0 if part == "full" else fraction,
        proportional=part == "proportional",
        scaling=SCALINGS[scaling](float(factor), length),
    )


def compute_ladder(theta, d, part, fraction, scaling, factor, length) -> dict:
    rope = chosen_rope(part, fraction, scaling, factor, length)
    width = round(d * fraction) if part == "partial" else d
    require(
        width >= 2 and width % 2 == 0,
        f"fraction={fraction} of d={d} turns {width} channels.",
        "Pairs turn, so the number must be even: choose 0.25, 0.5 or 1.",
    )
    wave = np.full(d // 2, np.nan)
    freq = scaled_frequencies(rope, width, theta).numpy()
    turning = np.flatnonzero(freq)
    wave[turning] = 2 * math.pi / freq[turning]
    plain = 2 * math.pi / inverse_frequencies(d, theta).numpy()
    return {"wave": wave, "plain": plain, "rope": rope}


def view_ladder(data, length):
    wave, pairs = data["wave"], np.arange(len(data["plain"]))
    turning = np.isfinite(wave)
    unfinished = int((wave[turning] > length).sum())
    return Lines(
        pairs,
        {
            "full, unscaled": data["plain"],
            "chosen": wave,
            f"{length} tokens": np.full(len(pairs), float(length)),
        },
        title=f"{unfinished} of {int(turning.sum())} turning pairs do not finish a turn in "
        f"{length} tokens",
        xlabel="pair, fast to slow",
        ylabel="tokens a turn",
        ylog=True,
        roles=["stream", "q", "k"],
    )


def ladder_explorable() -> Explorable:
    """The wavelength of each pair under every option of `Rope`. Module 05."""
    return Explorable(
        "wavelengths",
        compute_ladder,
        view_ladder,
        lambda data, length: (
            f"{int(np.isfinite(data['wave']).sum())} pairs turn, longest wavelength "
            f"{np.nanmax(data['wave']):,.0f} tokens, "
            f"{int((data['wave'] > length).sum())} unfinished in {length}"
        ),
        controls=dict(
            theta=Slider(10_000, label="theta", **THETA),
            d=Slider(128, values=(*WIDTHS, 512), label="width of a head", unit="channels"),
            part=Choice("full", PARTS, label="turned part"),
            fraction=Slider(0.25, values=(0.25, 0.5, 1.0), label="share of the head"),
            scaling=Choice("YaRN", tuple(SCALINGS), label="scaling"),
            factor=Slider(8, values=(2, 4, 8, 16, 32, 40), label="factor", unit="times as long"),
            length=Slider(4096, values=(1024, 2048, 4096, 8192, 32768), label="trained length",
                          unit="tokens"),
        ),
        title="How many tokens does each hand need for a turn?",
        alt=lambda data, length: (
            f"Wavelengths grow exponentially with the pair up to {np.nanmax(data['wave']):,.0f} "
            f"tokens; a line marks {length}."
        ),
        code=lambda part, fraction, scaling, factor, length: str(
            chosen_rope(part, fraction, scaling, factor, length)
        ),
        disabled=lambda part, scaling: (
            ({"fraction": "the full head turns"} if part == "full" else {})
            | ({"factor": "nothing is scaled"} if scaling == "none" else {})
        ),
        invariants=lambda data, scaling: [
            ("a scaled wavelength is never shorter",
             data["rope"].fraction < 1 or bool((data["wave"] > data["plain"] * (1 - 1e-9)).all())),
            ("some pair turns", bool(np.isfinite(data["wave"]).any())),
        ],
        height=350,
    )  # fmt: skip


# --- precision ------------------------------------------------------------------------------

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WINDOW = 64
STARTS = (0, 100, 200, 500, 1000, 2000, 4000, 16000, 60000, 10**6, 10**7, 2 * 10**7)


def compute_precision(dtype: str, start: int) -> dict:
    exact = torch.arange(start, start + WINDOW, dtype=torch.float64)
    stored = exact.to(DTYPES[dtype]).double()
    limit = torch.finfo(DTYPES[dtype]).max
    require(
        bool(stored.isfinite().all()),
        f"start={start}: {dtype} ends at {limit:,.0f}, and positions beyond are infinite.",
        "Choose a smaller start, or a dtype with more exponent bits.",
    )
    # the angle of the fastest pair is the position itself, 1 rad a token
    return {
        "places": (stored - start).numpy(),
        "distinct": len(stored.unique()),
        "exact": exact.cos().numpy(),
        "got": stored.cos().numpy(),
    }


def view_precision(data, dtype, start):
    tokens, error = np.arange(WINDOW), np.abs(data["exact"] - data["got"]).max()
    return [
        Lines(
            tokens,
            {"exact": tokens.astype(float), dtype: data["places"]},
            title=f"{data['distinct']} of {WINDOW} positions are told apart",
            xlabel=f"token after position {start}",
            ylabel=f"stored position - {start}",
            roles=["stream", "k"],
        ),
        Lines(
            tokens,
            {"exact": data["exact"], dtype: data["got"]},
            title=f"Fastest pair: cosine wrong by up to {error:.2f}",
            xlabel=f"token after position {start}",
            ylabel="cosine of the angle",
            limits=(-1.1, 1.1),
            roles=["stream", "k"],
        ),
    ]


def precision_explorable() -> Explorable:
    """Positions stored in a small floating-point type. Module 05."""
    return Explorable(
        "precision",
        compute_precision,
        view_precision,
        lambda data, dtype, start: (
            f"{dtype} from position {start}: {data['distinct']} of {WINDOW} positions distinct, "
            f"cosine wrong by up to {np.abs(data['exact'] - data['got']).max():.2f}"
        ),
        controls=dict(
            dtype=Choice("bfloat16", tuple(DTYPES), label="positions stored as"),
            start=Slider(1000, values=STARTS, label="first position shown"),
        ),
        title="When do positions run together?",
        alt=lambda data, dtype, start: (
            f"From position {start}, {dtype} stores {data['distinct']} of {WINDOW} positions "
            f"apart: {'steps instead of a line' if data['distinct'] < WINDOW else 'a line'}."
        ),
        code=lambda dtype, start: (
            f"torch.arange({start}, {start + WINDOW}).to(torch.{dtype}).unique().numel()"
        ),
        invariants=lambda data: [("1 to 64 distinct", 1 <= data["distinct"] <= WINDOW)],
    )


# --- ALiBi ----------------------------------------------------------------------------------


def compute_alibi(heads: int, T: int, causal: bool) -> dict:
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
    ahead = (torch.arange(T) - torch.arange(T)[:, None]).float()
    bias = alibi_bias(heads, T, T) if causal else slopes[:, None, None] * ahead
    return {"slopes": slopes.numpy(), "bias": bias.numpy(), "weights": bias.softmax(-1).numpy()}


def view_alibi(data, heads, T, causal, head, query):
    head, query = min(head, heads - 1), min(query, T - 1)
    bias = data["bias"][head]
    hidden = ~np.isfinite(bias)
    weights = data["weights"][head, query]
    span = float(np.abs(bias[~hidden]).max()) or 1.0
    return [
        Heat(
            np.where(hidden, 0, bias),
            hidden=hidden,
            title=f"Head {head}: {'a growing penalty' if causal else 'a bonus ahead'}",
            xlabel="key (token)",
            ylabel="query (token)",
            scale="diverging",
            limits=(-span, span),
            pick={"y": "query"},
            mark=(query, query),
        ),
        Lines(
            np.arange(T),
            {f"weights of query {query}": weights},
            title=f"Equal scores: weights of query {query}",
            xlabel="key (token)",
            ylabel="weight",
            roles=["scores"],
            limits=(0, 1.05),
            dots=True,
        ),
        Bars(
            data["slopes"],
            [str(h) for h in range(heads)],
            title="Slope of each head",
            xlabel="head",
            ylabel="slope",
            role="q",
            fmt="{:.2g}",
            show_values=heads <= 8,
            pick={"x": "head"},
            mark=head,
        ),
    ]


def alibi_summary(data, heads, T, causal, head, query):
    head, query = min(head, heads - 1), min(query, T - 1)
    weights = data["weights"][head, query]
    return (
        f"head {head} of {heads}, slope {data['slopes'][head]:.4f}, query {query} gives "
        f"{weights[query]:.3f} to itself and {weights[query + 1 :].sum():.3f} to later keys"
    )


def alibi_explorable() -> Explorable:
    """ALiBi's slopes and biases, with and without a causal mask. Module 05."""
    return Explorable(
        "alibi",
        compute_alibi,
        view_alibi,
        alibi_summary,
        controls=dict(
            heads=Slider(8, 1, 32, label="heads H"),
            T=Slider(16, 4, 64, label="tokens"),
            head=Slider(2, 0, 31, label="head shown"),
            query=Slider(12, 0, 63, label="query shown"),
            causal=Toggle(True, label="causal mask"),
        ),
        view_only=("head", "query"),
        title="A penalty for distance, and what it is without a mask",
        alt=lambda data, heads, head, causal: (
            f"Slopes fall from {data['slopes'][0]:.3f} to {data['slopes'][-1]:.4f}; "
            f"{'later keys are masked' if causal else 'later keys get a bonus'}."
        ),
        code=lambda heads: f"Config(position=ALiBi(), n_heads={heads})",
        invariants=lambda data, causal: [
            ("weights sum to 1", bool(np.allclose(data["weights"].sum(-1), 1, atol=1e-5))),
            ("no weight on masked keys",
             not causal or bool(np.allclose(np.triu(data["weights"], 1), 0))),
            ("the last slope is 2^-8", abs(float(data["slopes"][-1]) - 2**-8) < 1e-6),
        ],
    )  # fmt: skip


__all__ = [
    "alibi_explorable",
    "clock_explorable",
    "ladder_explorable",
    "permutation_explorable",
    "precision_explorable",
    "score_explorable",
    "sinusoid_explorable",
]
