"""The static plots of the notebooks: each draws the data it is given on the axes it is given."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from course_lib.teaching.theme import (
    HATCH,
    INK,
    MASKED,
    ROLE,
    SEQUENTIAL,
    STYLE,
    role_colour,
)
from course_lib.trace import Trace

# A style only holds while a figure is made and saved; what is drawn in between asks for it here.
SMALL, TITLE = STYLE["font.size"], STYLE["axes.titlesize"]
STAGE_ROLES = {  # last part of a stage's name to the role of its colour; the rest is the stream
    "q": "q", "q_rotated": "q", "heads": "q", "concat": "q",
    "k": "k", "k_rotated": "k", "k_expanded": "k", "k_rope": "k", "latent": "cache",
    "v": "v", "v_expanded": "v",
    "scores": "scores", "weights": "scores",
    "router_logits": "router", "chosen": "router",
    "norm1": "norm", "norm2": "norm", "norm_f": "norm",
    "lm_head": "experts",
}  # fmt: skip
ROLE_LABELS = {
    "stream": "residual stream, and what is added to it",
    "norm": "normalised copy",
    "q": "queries, heads",
    "k": "keys",
    "v": "values",
    "scores": "scores, weights",
    "router": "router",
    "experts": "logits",
    "cache": "latent",
}


def role_of_stage(name: str) -> str:
    """The role whose colour a stage of a trace gets."""
    return STAGE_ROLES.get(name.rsplit(".", 1)[-1], "stream")


def draw_silhouette(run: Trace, ax: Axes):
    """One bar a stage, its height the numbers it holds for each token, in forward order."""
    tokens = run["ids"].value.numel()
    stages = [s for s in run if s.name != "ids" and not s.name.endswith(("ffn.weights", "chosen"))]
    heights = np.array([stage.value.numel() / tokens for stage in stages])
    roles = [role_of_stage(stage.name) for stage in stages]
    ax.bar(range(len(stages)), heights, 0.86, -heights / 2, color=[ROLE[r] for r in roles])
    draw_block_names(stages, heights.max() / 2, ax)
    ax.set_xlim(-1, len(stages))
    ax.set_yticks([])
    ax.set_ylabel("numbers a token")
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    ends = [0, len(stages) - 1]
    for i in ends:
        ax.text(i, heights[i] / 2, f"{heights[i]:.0f}", ha="center", va="bottom", fontsize=SMALL)
    used = [role for role in ROLE_LABELS if role in roles]
    handles = [Patch(color=ROLE[role], label=ROLE_LABELS[role]) for role in used]
    ax.legend(
        handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False
    )


def draw_block_names(stages: Sequence, top: float, ax: Axes):
    """A light band behind every second block, and its number under it."""
    blocks = [s.name.split(".")[1] if s.name.startswith("blocks.") else "" for s in stages]
    places = [(i, b) for i, b in enumerate(blocks) if b]
    ticks, names = [0], ["embed"]
    for block in dict.fromkeys(b for _, b in places):
        inside = [i for i, b in places if b == block]
        ticks.append((inside[0] + inside[-1]) / 2)
        names.append(f"block {block}")
        if int(block) % 2 == 0:
            ax.axvspan(inside[0] - 0.5, inside[-1] + 0.5, color="#eef0f3", zorder=0)
    ticks.append(len(stages) - 1)
    names.append("head")
    ax.set_ylim(-top * 1.05, top * 1.12)
    ax.set_xticks(ticks, names)
    ax.tick_params(axis="x", length=0)


def draw_usage(counts: Sequence[int], ax: Axes, title: str = "", even: float | None = None):
    """How many slots each expert got, the number on its bar; `even` is a dashed line."""
    colours = [role_colour(f"expert {e}") for e in range(len(counts))]
    bars = ax.bar(range(len(counts)), counts, color=colours)
    ground = dict(facecolor="white", edgecolor="none", pad=0.6)
    ax.bar_label(bars, fontsize=SMALL, padding=2, bbox=ground)
    ax.set_title(title, loc="left", fontweight="bold", fontsize=TITLE)
    ax.set_xlabel("expert")
    ax.set_xticks(range(len(counts)))
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ax.set_ylim(0, max(counts) * 1.18)
    if even is not None:
        ax.axhline(even, color=INK["light"], linestyle="--", linewidth=1)
        ax.set_xlabel(f"expert (dashed: even use, {even:g} slots each)")


def draw_position_errors(errors: Mapping[str, Sequence[float]], ax: Axes, boundary: int):
    """A row for each mistake, a cell for each position: the largest difference of its logits.

    Cells below 1e-5 stay empty; the line stands between the first chunk and the next."""
    values = np.array(list(errors.values()))
    ax.imshow(values, cmap=SEQUENTIAL, vmin=0, vmax=values.max(), aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        if value >= 1e-5:
            colour = "white" if value > 0.55 * values.max() else INK["light"]
            ax.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour, size=SMALL)
    ax.axvline(boundary - 0.5, color=ROLE["cache"], linewidth=3)
    ax.set_xticks(range(values.shape[1]))
    ax.set_yticks(range(len(errors)), list(errors))
    ax.tick_params(length=0)
    ax.set_xlabel("position of the token (the line: here the second chunk begins)")
    for spine in ax.spines.values():
        spine.set_visible(False)


def draw_mask(allowed, ax: Axes, title: str = ""):
    """Queries (rows) by keys (columns): filled where a query sees a key, hatched where not."""
    allowed = np.asarray(allowed)
    rows, columns = allowed.shape
    for row, column in np.ndindex(rows, columns):
        seen = allowed[row, column]
        look = dict(facecolor=ROLE["scores"], edgecolor="white") if seen else hatched()
        ax.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, **look))
    ax.set_xlim(-0.5, columns - 0.5)
    ax.set_ylim(rows - 0.5, -0.5)
    ax.set_aspect("equal")
    ax.set_title(title, loc="left", fontweight="bold", fontsize=TITLE)
    ax.set_xticks(range(columns))
    ax.set_yticks(range(rows), [str(columns - rows + i) for i in range(rows)])
    ax.set_xlabel("key at position")
    ax.set_ylabel("query at position")
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)


def hatched() -> dict:
    """How a cell that is masked looks, which is not how zero looks."""
    return dict(facecolor=MASKED["light"], hatch="///", linewidth=0, edgecolor=HATCH["light"])


def draw_attention(weights, tokens: Sequence[str], ax: Axes, title: str = ""):
    """Attention weights (T, T) of one head, 0 to 1; the future is hatched."""
    weights = np.asarray(weights)
    T = len(weights)
    future = np.triu(np.ones((T, T), dtype=bool), 1)
    ax.imshow(np.ma.masked_array(weights, future), cmap=SEQUENTIAL, vmin=0, vmax=1)
    ax.add_patch(Rectangle((-0.5, -0.5), T, T, zorder=-1, **hatched()))
    ax.set_title(title, loc="left", fontweight="bold", fontsize=TITLE)
    ax.set_xticks(range(T), tokens, rotation=60, ha="right", rotation_mode="anchor")
    ax.set_yticks(range(T), tokens)
    ax.tick_params(length=0)


def draw_losses(curves: Mapping[str, Sequence[float]], ax: Axes, floor: float, floor_label: str):
    """Loss by training step, and the floor that an honest model cannot pass."""
    for (name, values), role in zip(curves.items(), ("q", "k"), strict=False):
        ax.plot(values, color=ROLE[role], label=name)
        ax.annotate(
            name, (len(values) - 1, values[-1]), (0, 6), textcoords="offset points",
            ha="right", va="bottom", color=ROLE[role],
        )  # fmt: skip
    ax.axhline(floor, color=INK["light"], linestyle="--", linewidth=1)
    ax.text(
        0.3, floor, floor_label, va="bottom", fontsize=SMALL, transform=ax.get_yaxis_transform()
    )
    ax.set_ylim(0, 1.25 * max(floor, *(v[0] for v in curves.values())))
    ax.set_xlabel("training step")
    ax.set_ylabel("nats a token")


def draw_parameters(rows: Mapping[str, Mapping[str, int]], ax: Axes):
    """A stacked bar for each row: its parts as shares of the first row's sum."""
    roles = {"embedding": "stream", "attention": "q", "dense feed-forward": "norm",
             "shared experts": "shared", "routed experts": "experts"}  # fmt: skip
    whole = sum(next(iter(rows.values())).values())
    for y, parts in enumerate(rows.values()):
        left = 0.0
        for part, n in parts.items():
            ax.barh(y, n / whole, 0.62, left, color=ROLE[roles[part]], edgecolor="white")
            if n / whole > 0.05:
                ax.text(left + n / whole / 2, y, f"{n / whole:.1%}", ha="center", va="center",
                        color="white", fontsize=SMALL, fontweight="bold")  # fmt: skip
            left += n / whole
        ax.text(left + 0.008, y, f"{sum(parts.values()):,}", va="center", fontsize=SMALL)
    names = next(iter(rows.values()))
    handles = [Patch(color=ROLE[roles[p]], label=p) for p in names]
    place = dict(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=len(handles))
    ax.legend(handles=handles, frameon=False, **place)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlim(0, 1.14)
    ax.set_xticks([])
    ax.tick_params(length=0)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)


def draw_bytes(bytes_of: Mapping[str, int], ax: Axes):
    """A bar for each way of caching, labelled with its bytes."""
    bars = ax.barh(range(len(bytes_of)), list(bytes_of.values()), color=ROLE["cache"])
    ax.bar_label(bars, [f"{n:,} bytes" for n in bytes_of.values()], padding=4, fontsize=SMALL)
    ax.set_yticks(range(len(bytes_of)), list(bytes_of))
    ax.invert_yaxis()
    ax.set_xticks([])
    ax.set_xlim(0, 1.2 * max(bytes_of.values()))
    ax.tick_params(length=0)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
