"""The drawings of module 05: clock faces, and boxes with arrows. Each draws what it is given."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Circle, FancyBboxPatch, Wedge
from torch import Tensor

from course_lib.teaching.theme import DIVERGING, INK, MASKED, ROLE, STYLE

DARK = INK["light"]
SMALL = STYLE["font.size"]


def titled(ax: Axes, title: str, **labels) -> Axes:
    """Give axes the finding as their title, and labels and limits as `Axes.set` takes them.

    Module 05."""
    ax.set(**labels)
    ax.set_title(title, loc="left", fontweight="bold", fontsize=STYLE["axes.titlesize"])
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize=SMALL)
    return ax


# --- clock faces: angle 0 points right, and hands turn counter-clockwise ---------------------

Face = tuple[str, float, float]  # caption, angle of the query's hand, of the key's hand (radians)


def between(query: float, key: float) -> tuple[float, float]:
    """Start and size of the arc from the key's hand to the query's, the short way round."""
    size = math.remainder(query - key, 2 * math.pi)
    return (key if size >= 0 else query) % (2 * math.pi), abs(size)


def draw_clocks(ax: Axes, faces: Sequence[Face]):
    """Clock faces in a row: two hands each, and the angle between them shaded. Module 05."""
    step = 2.6
    ax.set(xlim=(-1.3, step * len(faces) - 1.3), ylim=(-1.6, 1.5), aspect="equal")
    ax.set_axis_off()
    for i, (caption, query, key) in enumerate(faces):
        x, (start, size) = step * i, between(query, key)
        first, last = math.degrees(start), math.degrees(start + size)
        ax.add_patch(Wedge((x, 0), 0.62, first, last, color=ROLE["scores"], alpha=0.35, lw=0))
        ax.add_patch(Circle((x, 0), 1, fill=False, edgecolor="#9aa1ab", linewidth=1.2))
        for role, angle, length in (("k", key, 0.92), ("q", query, 0.80)):
            tip = (x + length * math.cos(angle), length * math.sin(angle))
            ax.plot((x, tip[0]), (0, tip[1]), color=ROLE[role], linewidth=3)
        style = dict(ha="center", va="center", fontsize=SMALL, color=DARK)
        ax.text(x, 1.25, caption, **style)
        ax.text(x, -1.28, f"{size:.2f} rad apart", **style)


SIZE, RADIUS = 150, 52  # pixels of one face in the browser


def clock_svg(faces: Sequence[Face]) -> str:
    """The same faces as SVG for the browser; text takes the theme's colour. Module 05."""
    width = SIZE * len(faces)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {SIZE}">']
    parts += [face_svg(SIZE * (i + 0.5), face) for i, face in enumerate(faces)]
    return "".join([*parts, "</svg>"])


def face_svg(x: float, face: Face) -> str:
    caption, query, key = face
    y, (start, size) = SIZE / 2, between(query, key)

    def point(angle: float, share: float) -> str:
        dx, dy = RADIUS * share * math.cos(angle), RADIUS * share * math.sin(angle)
        return f"{x + dx:.1f},{y - dy:.1f}"

    r = RADIUS * 0.62
    wedge = f"M{x},{y} L{point(start, 0.62)} A{r},{r} 0 0 0 {point(start + size, 0.62)} Z"
    hands = "".join(
        f'<polyline points="{x},{y} {point(angle, length)}" stroke="{ROLE[role]}" '
        f'stroke-width="4" stroke-linecap="round" fill="none"/>'
        for role, angle, length in (("k", key, 0.92), ("q", query, 0.80))
    )
    text = 'text-anchor="middle" font-size="13" font-family="sans-serif" fill="currentColor"'
    return (
        f'<circle cx="{x}" cy="{y}" r="{RADIUS}" fill="none" stroke="#9aa1ab"/>'
        f'<path d="{wedge}" fill="{ROLE["scores"]}" fill-opacity="0.35"/>{hands}'
        f'<text x="{x}" y="14" {text}>{caption}</text>'
        f'<text x="{x}" y="{SIZE - 6}" {text}>{size:.2f} rad apart</text>'
    )


# --- a shift as a matrix, a rotation of two vectors ------------------------------------------


def draw_matrix(ax: Axes, matrix: Tensor):
    """A matrix of numbers from -1 to 1, positive orange, negative blue. Module 05."""
    ax.imshow(matrix, cmap=DIVERGING, vmin=-1, vmax=1)
    ax.set(xticks=[], yticks=[])
    for spine in ax.spines.values():
        spine.set_visible(True)


def draw_vectors(ax: Axes, query: Tensor, key: Tensor):
    """A query and a key of one pair as arrows, and the angle between them. Module 05."""
    angles = [math.atan2(y, x) for x, y in (query.tolist(), key.tolist())]
    start, size = between(*angles)
    reach = 1.1 * max(query.norm().item(), key.norm().item())
    ax.set(xlim=(-reach, 2.6 * reach), ylim=(-reach, reach), aspect="equal")
    ax.set_axis_off()
    ax.text(1.15 * reach, 0, f"{size:.2f} rad apart", va="center", fontsize=SMALL, color=DARK)
    first, last = math.degrees(start), math.degrees(start + size)
    ax.add_patch(Wedge((0, 0), 0.7 * reach, first, last, color=ROLE["scores"], alpha=0.35, lw=0))
    ax.add_patch(Circle((0, 0), reach / 1.1, fill=False, edgecolor="#9aa1ab", linewidth=1))
    for role, tip in (("q", query.tolist()), ("k", key.tolist())):
        style = dict(arrowstyle="-|>", color=ROLE[role], linewidth=2.6, shrinkA=0, shrinkB=0)
        ax.annotate("", tip, (0, 0), arrowprops=style)


# --- boxes and arrows -----------------------------------------------------------------------


def bare(ax: Axes, width: float, height: float):
    ax.set(xlim=(0, width), ylim=(0, height), xticks=[], yticks=[])
    ax.set_frame_on(False)


def draw_box(ax: Axes, x: float, y: float, text: str, role: str | None = None, size=(1.7, 0.62)):
    """A rounded box centred at (x, y) with text in it, its edge in the colour of a role."""
    width, height = size
    edge = ROLE[role] if role else "#9aa1ab"
    place = (x - width / 2, y - height / 2)
    style = dict(boxstyle="round,pad=0.02,rounding_size=0.08", facecolor="white")
    ax.add_patch(FancyBboxPatch(place, width, height, edgecolor=edge, linewidth=1.8, **style))
    ax.text(x, y, text, ha="center", va="center", fontsize=SMALL, color=DARK)


def draw_arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float]):
    style = dict(arrowstyle="-|>", color=DARK, linewidth=1.3, shrinkA=0, shrinkB=0)
    ax.annotate("", end, start, arrowprops=style)


def draw_attempts(ax: Axes, attempts: Sequence[tuple[str, str]]):
    """A chain of boxes; below each what it leaves to be desired. Module 05."""
    step = 2.1
    bare(ax, step * len(attempts), 2.0)
    for i, (name, lack) in enumerate(attempts):
        x, last = step * (i + 0.5), i == len(attempts) - 1
        draw_box(ax, x, 1.45, name, "v" if last else "stream")
        if not last:
            draw_arrow(ax, (x + 0.89, 1.45), (x + step - 0.89, 1.45))
        ax.text(x, 0.95, lack, ha="center", va="top", fontsize=SMALL, color=DARK)


def draw_two_places(ax: Axes):
    """Where positions enter: once into the stream, or into q and k of every layer. Module 05."""
    bare(ax, 12, 4.4)
    for left, title in ((0.1, "added once, at the input"), (6.3, "turned in every layer")):
        ax.text(left, 4.15, title, fontweight="bold", fontsize=SMALL + 1, color=DARK)
    draw_box(ax, 1.1, 3.2, "ids", "stream")
    draw_box(ax, 3.4, 3.2, "embedding\n(T, D)", "stream")
    draw_box(ax, 1.1, 1.6, "positions", "scores")
    draw_box(ax, 3.4, 1.6, "sinusoids\n(T, D)", "scores")
    draw_box(ax, 4.95, 2.4, "+", None, (0.5, 0.5))
    draw_box(ax, 4.95, 0.6, "block 1, 2, ...", None)
    for start, end in (((1.97, 3.2), (2.53, 3.2)), ((1.97, 1.6), (2.53, 1.6)),
                       ((4.27, 3.05), (4.72, 2.6)), ((4.27, 1.75), (4.72, 2.2)),
                       ((4.95, 2.13), (4.95, 0.93))):  # fmt: skip
        draw_arrow(ax, start, end)
    for y, role, word in ((3.2, "q", "queries"), (2.2, "k", "keys"), (1.2, "v", "values")):
        draw_box(ax, 7.2, y, word, role)
        if role != "v":
            draw_box(ax, 9.2, y, "turn by\npositions", "scores", (1.5, 0.72))
            draw_arrow(ax, (8.07, y), (8.43, y))
        draw_arrow(ax, (9.97 if role != "v" else 8.07, y), (10.4, 2.2 + 0.35 * (y - 2.2)))
    draw_box(ax, 11.15, 2.2, "scores,\nweights,\nsum", None, (1.4, 1.3))
    ax.text(6.35, 0.35, "in each block again; no parameters; values stay as they are",
            fontsize=SMALL, color=DARK)  # fmt: skip


def draw_families(ax: Axes, families: dict[str, Sequence[str]]):
    """A tree of two levels: a family of position schemes, and its members. Module 05."""
    bare(ax, 12, 0.75 * max(map(len, families.values())) + 1.9)
    top = ax.get_ylim()[1] - 0.4
    draw_box(ax, 6, top, "how order gets in", None, (2.6, 0.6))
    step = 12 / len(families)
    for i, (family, members) in enumerate(families.items()):
        x = step * (i + 0.5)
        draw_arrow(ax, (6, top - 0.32), (x, top - 0.88))
        draw_box(ax, x, top - 1.2, family, "scores", (0.92 * step, 0.6))
        for j, member in enumerate(members):
            y = top - 1.95 - 0.68 * j
            box = dict(boxstyle="round,pad=0.25", facecolor=MASKED["light"], linewidth=0)
            ax.text(x, y, member, ha="center", va="center", fontsize=SMALL, color=DARK, bbox=box)
