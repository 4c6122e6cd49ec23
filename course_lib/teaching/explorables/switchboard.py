"""The bug switchboard: mistakes on and off, and how far each position is from the right answer."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from course_lib.model import Config, ModernDecoder
from course_lib.serving import new_caches
from course_lib.teaching import wrong
from course_lib.teaching.explore import Explorable, Slider, Toggle
from course_lib.teaching.panels import Bars, Heat, Note
from course_lib.trace import Trace, trace

TOKENS = 12
MISTAKES = {
    "rope_on_v": wrong.RopeOnV,
    "norm_after_rope": wrong.NormAfterRope,
    "tiled_heads": wrong.TiledHeads,
    "cache_expanded": wrong.CacheExpanded,
    "upper_left_mask": wrong.UpperLeftMask,
    "offset_zero": wrong.PositionsRestart,
}
LABELS = {
    "rope_on_v": "RoPE on V too",
    "norm_after_rope": "QK-Norm after RoPE",
    "tiled_heads": "K/V heads tiled",
    "cache_expanded": "expand, then cache",
    "upper_left_mask": "upper-left mask",
    "offset_zero": "pos_offset stuck at 0",
}
# Stages of a block, in order, whose rows the map shows; all but the weights hold numbers a token.
SHOWN = {
    "q_rotated": "queries",
    "k_rotated": "keys",
    "v_expanded": "values",
    "weights": "weights",
    "heads": "heads",
    "after_attn": "after attn",
    "after_ffn": "after FFN",
}
SAME = 1e-4  # relative difference below which two forms are the same but for rounding


@lru_cache(1)
def reference() -> tuple[ModernDecoder, Tensor]:
    """A small decoder whose QK-Norm gains are not 1, as after training, and twelve tokens."""
    cfg = Config(
        vocab_size=64, d_model=64, n_layers=2, n_heads=8, n_kv_heads=2, d_head=16, d_ff=128,
        n_experts=0, max_seq_len=32,
    )  # fmt: skip
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = ModernDecoder(cfg)
        for block in model.blocks:
            for norm in (block.attn.q_norm, block.attn.k_norm):
                norm.weight.uniform_(0.5, 1.5)
        return model, torch.randint(cfg.vocab_size, (1, TOKENS))


def in_chunks(model: ModernDecoder, cached: int) -> tuple[list[Trace], int]:
    """Record the first `cached` tokens and the rest behind them; and the bytes they leave."""
    ids = reference()[1]
    caches = new_caches(model)
    parts = [part for part in (ids[:, :cached], ids[:, cached:]) if part.shape[1]]
    runs = [trace(model, part, caches, caches[0].length, flops=False) for part in parts]
    return runs, sum(cache.nbytes for cache in caches)


def by_position(runs: list[Trace], name: str) -> Tensor:
    """One stage as (T, numbers), the chunks one behind the other.

    Weights get a column for each key that there could be; of keys and values that were
    read back from the cache, only the new ones count."""
    rows = []
    for run in runs:
        stage, T = run[name], run["ids"].shape[1]
        value = stage.value[0]
        if stage.axes.endswith("T S"):
            value = torch.nn.functional.pad(value, (0, TOKENS - value.shape[-1]))
        token_axis = -2  # (heads, T, width) or (T, D)
        value = value.narrow(token_axis, value.shape[token_axis] - T, T)
        rows.append(value.transpose(0, -2).flatten(1) if value.dim() == 3 else value)
    return torch.cat(rows)


@lru_cache(TOKENS)
def right_answer(cached: int) -> tuple[dict[str, Tensor], int]:
    runs, nbytes = in_chunks(reference()[0], cached)
    return {name: by_position(runs, name) for name in stage_names()} | {
        "logits": by_position(runs, "lm_head")
    }, nbytes


def stage_names() -> list[str]:
    layers = range(reference()[0].cfg.n_layers)
    return [
        f"blocks.{i}.{'' if part.startswith('after') else 'attn.'}{part}"
        for i in layers
        for part in SHOWN
    ]


def chosen(state: dict) -> list[type]:
    return [mistake for name, mistake in MISTAKES.items() if state[name]]


def compute(
    rope_on_v: bool,
    norm_after_rope: bool,
    tiled_heads: bool,
    cache_expanded: bool,
    upper_left_mask: bool,
    offset_zero: bool,
    cached: int,
) -> dict:
    state = locals()
    made, nbytes = in_chunks(wrong.with_mistakes(reference()[0], *chosen(state)), cached)
    right, right_bytes = right_answer(cached)
    spread = torch.stack([relative(by_position(made, name), right[name]) for name in stage_names()])
    logits = by_position(made, "lm_head")
    return {
        "errors": (logits - right["logits"]).abs().amax(-1),
        "spread": spread,  # (stages, T)
        "other_choice": int((logits.argmax(-1) != right["logits"].argmax(-1)).sum()),
        "bytes": nbytes,
        "right_bytes": right_bytes,
        "weight_sums": by_position(made, "blocks.0.attn.weights").sum(-1),
    }


def relative(made: Tensor, right: Tensor) -> Tensor:
    """Length of the difference over the length of the right vector, at each position."""
    return (made - right).norm(dim=-1) / right.norm(dim=-1)


def first_difference(spread: Tensor) -> str:
    rows = (spread > SAME).any(-1).nonzero()
    return row_labels()[int(rows[0])] if len(rows) else "no stage"


def row_labels() -> list[str]:
    layers = range(reference()[0].cfg.n_layers)
    return [f"block {i}, {label}" for i in layers for label in SHOWN.values()]


def view(data, cached: int):
    ticks = [str(t) for t in range(TOKENS)]
    wrong_ones = int((data["errors"] > SAME).sum())
    names = {0: "all logits as they should be"}
    title = names.get(wrong_ones, f"{wrong_ones} of {TOKENS} positions are wrong")
    title += f"; the second chunk begins at {cached}" * bool(cached)
    roles = ["cache" if t < cached else "scores" for t in range(TOKENS)]
    errors = Bars(
        data["errors"], ticks, title=title, ylabel="difference", roles=roles, fmt="{:.2f}",
        limits=(0, max(0.1, 1.15 * float(data["errors"].max()))), height=0.5,
    )  # fmt: skip
    spread = Heat(
        data["spread"].clamp(max=1), title=f"first to differ: {first_difference(data['spread'])}",
        xlabel="position", xticks=ticks, yticks=row_labels(), limits=(0, 1), square=False,
        width=2.0, height=0.5,
    )  # fmt: skip
    return [[errors], [spread, Note(note(data), title="how bad", width=0.9)]]


def note(data) -> str:
    factor = data["bytes"] / data["right_bytes"]
    return "\n".join(
        [
            "colour: difference over the",
            "length of the right vector",
            "",
            "another likeliest token",
            f"at {data['other_choice']} of {TOKENS} positions",
            "",
            f"cache   {data['bytes']:>7,} bytes",
            f"right   {data['right_bytes']:>7,} bytes",
            f"factor  {factor:>7g}",
        ]
    )


def summary(data, **state) -> str:
    names = [name for name in MISTAKES if state[name]]
    return (
        f"{', '.join(names) or 'no mistake'}, {state['cached']} tokens cached: "
        f"{int((data['errors'] > SAME).sum())} of {TOKENS} positions wrong, largest difference "
        f"{data['errors'].max():.2f}, cache {data['bytes']:,} bytes, first to differ: "
        f"{first_difference(data['spread'])}"
    )


def alt(data, **state) -> str:
    labels = [label for name, label in LABELS.items() if state[name]] or ["No mistake"]
    made = "; ".join(labels) if len(labels) < 3 else f"{labels[0]} and {len(labels) - 1} more"
    differ = int((data["errors"] > SAME).sum())
    return (
        f"{made}: {differ} of {TOKENS} positions get other logits; first to differ: "
        f"{first_difference(data['spread'])}."
    )


def code(**state) -> str:
    names = [mistake.__name__ for mistake in chosen(state)]
    return f"with_mistakes({', '.join(['model', *names])})"


def disabled(cached: int) -> dict[str, str]:
    if cached:
        return {}
    reason = "nothing is cached, so there is no second chunk"
    return {"upper_left_mask": reason, "offset_zero": reason}


def invariants(data, **state):
    silent = not chosen(state) or chosen(state) == [wrong.CacheExpanded]
    heads = reference()[0].cfg.n_heads
    factor = reference()[0].cfg.group_size if state["cache_expanded"] else 1
    sums = data["weight_sums"]
    return [
        ("differences are finite", bool(data["errors"].isfinite().all())),
        ("attention weights sum to 1", bool(torch.allclose(sums, torch.full_like(sums, heads)))),
        ("without a mistake nothing differs", not silent or float(data["errors"].max()) < SAME),
        ("expanding costs H / K", math.isclose(data["bytes"], factor * data["right_bytes"])),
    ]


def switch(name: str, help: str, on: bool = False) -> Toggle:
    return Toggle(on, label=LABELS[name], help=help)


def bug_switchboard() -> Explorable:
    """Six mistakes as switches, on the same weights and tokens. Module 16."""
    return Explorable(
        "switchboard",
        compute,
        view,
        summary,
        controls=dict(
            rope_on_v=switch("rope_on_v", "values are turned as well", True),
            norm_after_rope=switch("norm_after_rope", "turn, then normalise"),
            tiled_heads=switch("tiled_heads", "0 1 0 1 instead of 0 0 1 1"),
            cache_expanded=switch("cache_expanded", "8 heads kept instead of 2"),
            upper_left_mask=switch("upper_left_mask", "as torch's is_causal=True"),
            offset_zero=switch("offset_zero", "each chunk begins at 0"),
            cached=Slider(
                6, 0, TOKENS - 1, label="tokens in the cache", help="the rest come in one chunk"
            ),
        ),
        title="Which mistake shows where?",
        alt=alt,
        code=code,
        disabled=disabled,
        invariants=invariants,
        runs="model",
        height=384,
    )
