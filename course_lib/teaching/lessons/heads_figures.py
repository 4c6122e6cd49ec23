"""The pictures of module 09: sketches of lines, dots and boxes in two forms, and its plots."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch, Patch, Rectangle

from course_lib.teaching.lessons.heads import Device, read_by
from course_lib.teaching.theme import DPI, INK, ROLE, STYLE, png_of

SMALL = STYLE["font.size"]


# --- sketches: one list of shapes, drawn as SVG and by matplotlib -----------------------------


@dataclass
class Sketch:
    """Shapes in pixels, y downwards: (x1, y1, x2, y2, role, arrow), (x, y, r, role),
    (x, y, w, h, lines, role) and (x, y, text, anchor)."""

    width: int
    height: int
    lines: list[tuple] = field(default_factory=list)
    dots: list[tuple] = field(default_factory=list)
    boxes: list[tuple] = field(default_factory=list)
    texts: list[tuple] = field(default_factory=list)


def line_svg(x1, y1, x2, y2, role, arrow) -> str:
    style = f'stroke="{ROLE[role]}" stroke-width="{2 if arrow else 1.6}"'
    line = f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'
    if not arrow:
        return line
    angle = math.atan2(y2 - y1, x2 - x1)
    wings = [
        f"{x2 - 8 * math.cos(angle + turn):.1f},{y2 - 8 * math.sin(angle + turn):.1f}"
        for turn in (0.45, -0.45)
    ]
    return line + f'<polygon points="{x2:.1f},{y2:.1f} {" ".join(wings)}" fill="{ROLE[role]}"/>'


def text_svg(x, y, text, anchor, weight="normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="12" '
        f'font-weight="{weight}" font-family="sans-serif" fill="currentColor">'
        f"{html.escape(text)}</text>"
    )


def box_svg(x, y, w, h, lines, role) -> str:
    colour = ROLE[role]
    shape = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="6" fill="{colour}" '
        f'fill-opacity="0.13" stroke="{colour}" stroke-width="1.6"/>'
    )
    top = y + h / 2 - 7.5 * len(lines) + 11.5
    texts = [
        text_svg(x + w / 2, top + 15 * i, line, "middle", "normal" if i else "bold")
        for i, line in enumerate(lines)
    ]
    return shape + "".join(texts)


def sketch_svg(sketch: Sketch) -> str:
    """The sketch for the browser; text takes the theme's colour. Module 09."""
    size = f'viewBox="0 0 {sketch.width} {sketch.height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>']
    parts += [line_svg(*line) for line in sketch.lines]
    parts += [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}" fill="{ROLE[role]}"/>'
        for x, y, r, role in sketch.dots
    ]
    parts += [box_svg(*box) for box in sketch.boxes]
    parts += [text_svg(*text) for text in sketch.texts]
    return "".join([*parts, "</svg>"])


def draw_sketch(sketch: Sketch, ax: Axes):
    """The sketch on axes of its own, whose pixels are the sketch's. Module 09."""
    ax.set(xlim=(0, sketch.width), ylim=(sketch.height, 0), aspect="equal")
    ax.set_axis_off()
    size = dict(fontsize=12 * 72 / DPI, color=INK["light"])
    for x1, y1, x2, y2, role, arrow in sketch.lines:
        head = dict(arrowstyle="-|>" if arrow else "-", color=ROLE[role], shrinkA=0, shrinkB=0,
                    linewidth=1.5 if arrow else 1.2, mutation_scale=11)  # fmt: skip
        ax.annotate("", (x2, y2), (x1, y1), arrowprops=head)
    for x, y, r, role in sketch.dots:
        ax.add_patch(Circle((x, y), r, color=ROLE[role], zorder=3))
    for x, y, w, h, lines, role in sketch.boxes:
        for face, edge, alpha in ((ROLE[role], "none", 0.13), ("none", ROLE[role], 1)):
            ax.add_patch(FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0,rounding_size=6",
                                        facecolor=face, edgecolor=edge, alpha=alpha,
                                        linewidth=1.2))  # fmt: skip
        top = y + h / 2 - 7.5 * len(lines) + 7.5
        for i, line in enumerate(lines):
            ax.text(x + w / 2, top + 15 * i, line, ha="center", va="center",
                    fontweight="normal" if i else "bold", **size)  # fmt: skip
    for x, y, text, anchor in sketch.texts:
        side = {"start": "left", "middle": "center", "end": "right"}[anchor]
        ax.text(x, y - 4, text, ha=side, va="center", **size)


def sketch_png(sketch: Sketch) -> bytes:
    """What stands for the sketch where only a PNG is shown."""
    fig = Figure(figsize=(sketch.width / DPI, sketch.height / DPI), dpi=DPI)
    draw_sketch(sketch, fig.add_axes((0, 0, 1, 1)))
    return png_of(fig)


# --- who reads whom ---------------------------------------------------------------------------


def head_graph(H: int, K: int, tiled: bool = False, width: int = 920, height: int = 165) -> Sketch:
    """Query heads above, key/value heads below, a line from each to the one it reads. Module 09."""
    sketch = Sketch(width, height)
    left, right = 110, width - 16
    above, below = 34, height - 34
    # each key/value head stands under the middle of the query heads of its place
    x_q = np.linspace(left, right, H + 1)[:-1] + (right - left) / H / 2
    x_kv = x_q.reshape(K, -1).mean(1)
    radius = min(9.0, 0.36 * (right - left) / H)
    for h, head in enumerate(read_by(H, K, tiled)):
        sketch.lines.append((x_q[h], above, x_kv[head], below - 9, "scores", False))
    sketch.dots += [(x, above, radius, "q") for x in x_q]
    size = min(11.0, max(radius, 0.36 * (right - left) / K))
    sketch.boxes += [(x - size, below - 9, 2 * size, 18, (), "cache") for x in x_kv]
    sketch.texts += [(left - 14, above + 4, f"{H} query", "end"),
                     (left - 14, below + 4, f"{K} key/value", "end")]  # fmt: skip
    for xs, y, n, room in ((x_q, above - 16, H, 26), (x_kv, below + 26, K, 26)):
        every = max(1, math.ceil(n * room / (right - left)))
        for i in range(0, n, every):
            sketch.texts.append((xs[i], y + 4, str(i), "middle"))
    return sketch


# --- the cell of MLA --------------------------------------------------------------------------

Box = tuple[str, int, int, tuple[str, ...], str]  # name, column, row, lines, role


def cell_sketch(
    boxes: Sequence[Box], edges: Sequence[tuple[str, str, str]], caption: str
) -> Sketch:
    """Boxes on a grid of columns and rows, arrows (from, to, role) between them, and a caption in
    the lower left corner, which they leave free. Module 09."""
    column, row, w, h = 162, 46, 140, 38
    places = {name: (6 + column * x, 8 + row * y) for name, x, y, _, _ in boxes}
    right, bottom = (max(p[i] for p in places.values()) for i in (0, 1))
    sketch = Sketch(round(right + w + 6), round(bottom + h + 10))
    for source, target, role in edges:
        (x1, y1), (x2, y2) = places[source], places[target]
        if x1 == x2:
            down = y2 > y1
            ends = (x1 + w / 2, y1 + h * down, x2 + w / 2, y2 + h * (not down))
        else:
            ends = (x1 + w, y1 + h / 2, x2, y2 + h / 2 + min(12, max(-12, (y1 - y2) / 8)))
        sketch.lines.append((*ends, role, True))
    for name, _, _, lines, role in boxes:
        sketch.boxes.append((*places[name], w, h, lines, role))
    sketch.texts.append((6, sketch.height - 14, caption, "start"))
    return sketch


# --- plots ------------------------------------------------------------------------------------


def title(ax: Axes, text: str):
    ax.set_title(text, loc="left", fontsize=STYLE["axes.titlesize"], fontweight="bold")


def draw_areas(values: Mapping[str, int], notes: Mapping[str, str], ax: Axes):
    """A square for each name whose area is its number of values, side by side. Module 09."""
    side = {name: math.sqrt(n) for name, n in values.items()}
    x, gap = 0.0, 34.0
    for name, n in values.items():
        s = side[name]
        role = "scores" if name == "MLA" else "cache"
        ax.add_patch(Rectangle((x, 0), s, s, facecolor=ROLE[role], edgecolor="none"))
        centre, room = x + s / 2, max(s, 46.0)
        ax.text(centre, -6, name, ha="center", va="top", fontsize=SMALL + 2, fontweight="bold")
        ax.text(centre, -22, f"{n:,} values", ha="center", va="top", fontsize=SMALL)
        ax.text(centre, -34, notes[name], ha="center", va="top", fontsize=SMALL)
        x += room + gap
    ax.set(xlim=(-14, x - gap + 20), ylim=(-48, max(side.values()) + 4), aspect="equal")
    ax.set_axis_off()


def draw_growth(
    tokens: Sequence[int],
    curves: Mapping[str, Sequence[float]],
    limits: Mapping[str, float],
    ax: Axes,
):
    """GB against tokens, both logarithmic, each curve named at its end; dashed lines for limits."""
    roles = ("k", "cache", "v", "scores")
    for (name, values), role in zip(curves.items(), roles, strict=True):
        ax.plot(tokens, values, color=ROLE[role])
        ax.annotate(name, (tokens[-1], values[-1]), (6, -9 if role == "v" else 0),
                    textcoords="offset points",
                    fontsize=SMALL, color=ROLE[role])  # fmt: skip
    for name, value in limits.items():
        ax.plot(tokens, [value] * len(tokens), color=ROLE["stream"], linestyle="--", linewidth=1)
        ax.text(tokens[0], value * 1.12, name, fontsize=SMALL - 1)
    ax.set(xscale="log", yscale="log", xlim=(tokens[0] * 0.9, tokens[-1] * 6), ylim=(0.03, 4000))
    ax.set_xticks([tokens[i] for i in (0, 3, 5, 7, 10)], ["1k", "8k", "32k", "128k", "1M"])
    ax.minorticks_off()
    ax.set_xlabel("tokens of one request")
    ax.set_ylabel("GB in bf16")


def draw_models(rows: Sequence[tuple[str, float, float, str]], ax: Axes):
    """Published models by KiB a token: (name, all layers keep all, at 128k with windows, kind).

    Bars on a logarithmic axis, hatched where windows spare it. Module 09."""
    roles = {"MHA": "k", "GQA": "cache", "MLA": "scores", "few layers": "v"}
    for y, (_, whole, windowed, kind) in enumerate(rows):
        ax.barh(y, whole, color=ROLE[roles[kind]], alpha=0.3 if windowed < whole else 1)
        if windowed < whole:
            ax.barh(y, windowed, color=ROLE[roles[kind]])
        ax.text(whole * 1.06, y, f"{whole:g}", va="center", fontsize=SMALL - 1)
    ax.set_yticks(range(len(rows)), [row[0] for row in rows])
    ax.set(xscale="log", ylim=(len(rows) - 0.4, -0.6))
    ax.set_xlabel("KiB a token in bf16 (pale: what windows spare at 131,072 tokens)")
    handles = [Patch(color=ROLE[role], label=kind) for kind, role in roles.items()]
    ax.legend(handles=handles, loc="lower right", frameon=False)


def draw_roofline(device: Device, points: Mapping[str, tuple[float, str]], ax: Axes):
    """FLOP a second that each point, (FLOP a byte, role), can reach at most. Module 09."""
    xs = np.geomspace(0.5, 2000, 200)
    ax.plot(xs, np.minimum(xs * device.bandwidth, device.flops) / 1e12, color=ROLE["stream"])
    for name, (x, role) in points.items():
        y = min(x * device.bandwidth, device.flops) / 1e12
        ax.plot(x, y, marker="o", color=ROLE[role], markersize=8)
        left = (
            device.ridge / 2 < x < device.ridge
        )  # beside the ridge there is room on the left only
        ax.annotate(f"{name}: {x:.3g}", (x, y), (-10 if left else 9, -4 if left else -12),
                    textcoords="offset points", ha="right" if left else "left",
                    fontsize=SMALL)  # fmt: skip
    ax.axvline(device.ridge, color=ROLE["stream"], linestyle=":", linewidth=1.4)
    ax.text(device.ridge * 1.1, 0.04, f"ridge: {device.ridge:.0f}", fontsize=SMALL,
            transform=ax.get_xaxis_transform())  # fmt: skip
    ax.set(xscale="log", yscale="log", xlim=(0.5, 4000))
    ax.set_xlabel("FLOP for each byte of cache read")
    ax.set_ylabel("TFLOP/s at most")
    title(ax, f"{device.name}: left of the ridge, memory sets the pace")


def draw_losses(losses: Mapping[str, float], base: float, ax: Axes):
    """Horizontal bars of losses, the model's own also as a line; the last one is of no model."""
    names = list(losses)
    roles = ["cache" if losses[n] == base else "k" for n in names[:-1]] + ["stream"]
    ax.barh(range(len(names)), losses.values(), color=[ROLE[r] for r in roles])
    ax.axvline(base, color=ROLE["stream"], linestyle="--", linewidth=1.2)
    for y, loss in enumerate(losses.values()):
        ax.text(loss + 0.1, y, f"{loss:.2f}", va="center", fontsize=SMALL)
    ax.set_yticks(range(len(names)), names)
    ax.set(ylim=(len(names) - 0.4, -0.6), xlim=(0, max(losses.values()) * 1.13))
    ax.set_xlabel("nats a token")


def draw_by_layer(rises: Sequence[float], ax: Axes):
    """What merging the heads of one layer alone costs, layer by layer."""
    ax.bar(range(len(rises)), rises, color=ROLE["k"])
    ax.axhline(0, color=ROLE["stream"], linewidth=0.8)
    ax.set_xlabel("the one layer whose heads are merged")
    ax.set_ylabel("rise in nats a token")
