"""The static plots of module 12; each draws the data that it is given on the axes it is given."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from course_lib.teaching.theme import (
    EXPERTS,
    HATCH,
    INK,
    MASKED,
    ROLE,
    SEQUENTIAL,
    STYLE,
    role_colour,
)

SMALL = STYLE["font.size"]
PLAIN = dict(frameon=False)  # a style of theme.STYLE that holds only while axes are made


def name(ax: Axes, text: str):
    """A title as all figures of the course have it."""
    ax.set_title(text, loc="left", fontsize=STYLE["axes.titlesize"], fontweight="bold")


def draw_paths(paths: Mapping[str, np.ndarray], experts: int, ax: Axes):
    """Experts (columns) by layers (rows); each token's chosen ones in its colour, a dot where two
    tokens meet. paths: label to indices (L, k)."""
    first, second = paths.values()
    layers = len(first)
    roles = ("q", "k")
    ax.add_patch(Rectangle((-0.5, -0.5), experts, layers, color=MASKED["light"], alpha=0.55))
    for row in range(layers):
        for chosen, role in zip((first, second), roles, strict=True):
            for e in chosen[row]:
                ax.add_patch(Rectangle((e - 0.42, row - 0.42), 0.84, 0.84, color=ROLE[role]))
        for e in set(first[row]) & set(second[row]):
            ax.add_patch(Rectangle((e - 0.42, row - 0.42), 0.84, 0.84, color=ROLE["scores"]))
            ax.plot(e, row, marker="o", color="white", markersize=4)
    for edge in range(experts + 1):
        ax.axvline(edge - 0.5, color="white", linewidth=0.8)
    for edge in range(layers + 1):
        ax.axhline(edge - 0.5, color="white", linewidth=0.8)
    ax.set(xlim=(-0.5, experts - 0.5), ylim=(layers - 0.5, -0.5))
    ax.set_xlabel("expert")
    ax.set_ylabel("layer")
    ax.tick_params(length=0)
    names = [f"token {label}" for label in paths]
    handles = [Patch(color=ROLE[r], label=n) for r, n in zip(roles, names, strict=True)]
    handles.append(Patch(color=ROLE["scores"], label="both (dot)"))
    handles.append(Patch(color=MASKED["light"], label="stored, not used"))
    ax.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, **PLAIN)
    for spine in ax.spines.values():
        spine.set_visible(False)


def draw_weights(weights: np.ndarray, ax: Axes, title: str = ""):
    """Tokens (rows) by experts (columns): the weight where chosen, hatched where not."""
    N, E = weights.shape
    ax.imshow(np.ma.masked_equal(weights, 0), cmap=SEQUENTIAL, vmin=0, vmax=1, aspect="auto")
    ax.add_patch(
        Rectangle((-0.5, -0.5), E, N, zorder=-1, facecolor=MASKED["light"], hatch="///",
                  linewidth=0, edgecolor=HATCH["light"], alpha=0.8)
    )  # fmt: skip
    for (n, e), value in np.ndenumerate(weights):
        if value:
            colour = "white" if value > 0.55 else INK["light"]
            ax.text(e, n, f"{value:.2f}", ha="center", va="center", color=colour, size=SMALL)
    name(ax, title)
    ax.set_xticks(range(E))
    ax.set_yticks(range(N))
    ax.set_xlabel("expert (hatched: not chosen)")
    ax.set_ylabel("token")
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)


def draw_load_by_layer(loads: Sequence[Sequence[int]], mean: float, deviation: float, axes):
    """A panel for each layer; the grey band is where independent choices would fall, 2 sigma."""
    for i, (ax, load) in enumerate(zip(axes, loads, strict=True)):
        outside = sum(abs(n - mean) > 2 * deviation for n in load)
        ax.axhspan(mean - 2 * deviation, mean + 2 * deviation, color=MASKED["light"], zorder=0)
        ax.bar(
            range(len(load)),
            load,
            0.7,
            color=[role_colour(f"expert {e}") for e in range(len(load))],
        )
        name(ax, f"layer {i + 1}: {outside} of {len(load)} outside")
        ax.set_xticks(range(len(load)))
        ax.set_xlabel("expert")
        ax.set_ylim(0, 1.1 * max(max(row) for row in loads))
    axes[0].set_ylabel("slots")


def draw_evenness(runs: Mapping[str, np.ndarray], ax: Axes, window: int):
    """Evenness of the load over training, a line for each run, its name at its end."""
    for i, (label, values) in enumerate(runs.items()):
        x = window * (np.arange(len(values)) + 1)
        ax.plot(x, values, color=EXPERTS[i], label=label, linestyle=("-", "--", "-.", ":")[i % 4])
    ax.set_ylim(0.6, 1.02)
    ax.set_xlabel("training step")
    ax.set_ylabel("evenness of the load")
    ax.legend(loc="lower right", **PLAIN)


def draw_shares(shares: np.ndarray, ax: Axes, title: str, window: int):
    """Experts (rows) over training (columns): the share of the slots, 0 to 1/2 at k = 2."""
    steps = window * shares.shape[1]
    ax.imshow(shares, cmap=SEQUENTIAL, vmin=0, vmax=0.5, aspect="auto",
              extent=(0, steps, len(shares) - 0.5, -0.5))  # fmt: skip
    name(ax, title)
    ax.set_yticks(range(len(shares)))
    ax.set_xlabel("training step")
    ax.tick_params(length=0)


ANCHORS = {"above": ("center", "bottom", 0, 1), "below": ("center", "top", 0, -1),
           "right": ("left", "center", 1, 0)}  # fmt: skip


def draw_models(rows: Sequence[tuple], ax: Axes, places: Mapping[str, str]):
    """(name, experts, relative width, billions stored, active share) as bubbles; colour: share.

    places: on which side of its bubble a name stands where it is not above."""
    for label, experts, width, total, share in sorted(rows, key=lambda row: -row[3]):
        size = 2.2 * total  # area, in square points
        bubbles = ax.scatter(
            experts, width, s=size, c=[share], cmap=SEQUENTIAL, vmin=0, vmax=0.3,
            edgecolors=INK["light"], linewidths=0.8, alpha=0.9,
        )  # fmt: skip
        ha, va, dx, dy = ANCHORS[places.get(label, "above")]
        away = math.sqrt(size) / 2 + 3
        ax.annotate(
            label, (experts, width), (dx * away, dy * away), textcoords="offset points",
            fontsize=SMALL, ha=ha, va=va, color=INK["light"],
        )  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ticks = [8, 16, 32, 64, 128, 256, 512]
    ax.set_xticks(ticks, [str(t) for t in ticks])
    ax.set_yticks([0.25, 0.5, 1, 2, 4], ["1/4", "1/2", "1", "2", "4"])
    ax.set_xlim(5, 900)
    ax.set_ylim(0.17, 5)
    ax.set_xlabel("routed experts a layer")
    ax.set_ylabel("expert width / stream width")
    ax.figure.colorbar(bubbles, ax=ax, label="active share", format="{x:.0%}", pad=0.01)


def draw_kept(curves: Mapping[str, Mapping[str, Mapping]], axes: Sequence[Axes], floor: float):
    """Left: error of one layer by the share of its units that run; right: loss of the model."""
    for ax, kind in zip(axes, ("error", "loss"), strict=True):
        for i, (label, curve) in enumerate(curves[kind].items()):
            ax.plot([100 * s for s in curve], list(curve.values()), color=EXPERTS[i], label=label,
                    marker="os^D"[i % 4], linestyle=("-", "--", "-.", ":")[i % 4])  # fmt: skip
        ax.legend(**PLAIN)
    axes[0].set_xlabel("hidden units that run, % of layer 15")
    axes[0].set_ylabel("relative error of the layer")
    axes[0].set_ylim(0, 1.05)
    axes[1].axhline(floor, color=INK["light"], linewidth=1, linestyle="--")
    axes[1].text(60, floor - 0.15, "dense", ha="left", va="top", fontsize=SMALL)
    axes[1].set_ylim(floor - 1, None)
    axes[1].set_xlabel("hidden units that run, % of every layer")
    axes[1].set_ylabel("nats a token")
