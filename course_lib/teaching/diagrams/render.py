"""The same arranged grid as SVG text and as a picture: only lines, boxes and words."""

import io
from html import escape

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch, PathPatch, Polygon
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from course_lib.teaching.theme import INK, PAPER, role_colour

from .grid import Grid
from .routes import BEND
from .shapes import Edge, Frame, Node, Point, Text
from .text import CONDENSED, WEB_FONTS, Face

TINT, GROUND = 0.15, 0.05  # how much of its colour a node and a frame show
CHUNK = "course_lib.diagram"  # the text chunk of a PNG that holds its live form
PALETTE = 128  # colours of a stored PNG
MUTED = 0.68  # how much of the ink muted words show
CORNER = 6  # radius of a box


def number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def title_at(frame: Frame) -> Text:
    x, anchor = (frame.box.middle[0], "middle") if frame.centred else (frame.box.x + 12, "start")
    return Text(frame.title, Face(11.5, bold=True), x, frame.box.y + 18, anchor)


def bar(node: Node) -> tuple[float, float, float, float]:
    """x, y, full width and height of the bar that shows a node's share."""
    box = node.box
    return box.x + 8, box.bottom - 10, box.w - 16, 4.0


def head_length(edge: Edge) -> float:
    return 11 if edge.thick else 7


def head_of(path: list[Point], size: float) -> list[Point]:
    """The three corners of the arrow head at the end of a path."""
    (x0, y0), (x1, y1) = path[-2:]
    length = max(abs(x1 - x0) + abs(y1 - y0), 1e-9)
    dx, dy = (x1 - x0) / length, (y1 - y0) / length
    back = (x1 - size * dx, y1 - size * dy)
    half = size * 0.5
    return [
        (x1, y1),
        (back[0] - half * dy, back[1] + half * dx),
        (back[0] + half * dy, back[1] - half * dx),
    ]


def shortened(path: list[Point], size: float) -> list[Point]:
    """The path up to its arrow head, so that a thick line does not stick out of the tip."""
    (x0, y0), (x1, y1) = path[-2:]
    length = max(abs(x1 - x0) + abs(y1 - y0), 1e-9)
    cut = min(size - 1, length)
    return [*path[:-1], (x1 - cut * (x1 - x0) / length, y1 - cut * (y1 - y0) / length)]


def bends(path: list[Point]) -> list[tuple[Point, Point, Point]]:
    """For each inner corner: where the curve begins, the corner, where the curve ends."""
    found = []
    for before, corner, after in zip(path, path[1:], path[2:], strict=False):
        ends = []
        for other in (before, after):
            length = abs(other[0] - corner[0]) + abs(other[1] - corner[1])
            t = min(BEND, length / 2) / max(length, 1e-9)
            ends.append(tuple(c + (o - c) * t for c, o in zip(corner, other, strict=True)))
        found.append((ends[0], corner, ends[1]))
    return found


def line_width(edge: Edge) -> float:
    return 5 if edge.thick else 1.6


def ends_in_arrow(edge: Edge) -> bool:
    return all(target.kind != "dot" for target in edge.targets)


# -- SVG ------------------------------------------------------------------------------------


def svg(grid: Grid, title: str, description: str) -> str:
    """The diagram as SVG: presentation attributes in light colours, classes for a dark viewer."""
    w, h = grid.size
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" '
        f'role="img" aria-label="{escape(title)}" font-family="{WEB_FONTS}">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(description)}</desc>",
        f'<rect class="paper" width="{w}" height="{h}" fill="{PAPER["light"]}"/>',
        *(svg_frame(frame) for frame in grid.frames),
        *(svg_edge(edge) for edge in grid.edges),
        *(svg_node(node) for node in grid.nodes),
        *(svg_text(text) for edge in grid.edges for text in edge.texts),
    ]
    return "\n".join([*parts, "</svg>\n"])


def svg_text(text: Text) -> str:
    style = ' font-weight="bold"' if text.face.bold else ""
    style += ' font-style="italic"' if text.face.italic else ""
    style += f' fill-opacity="{MUTED}"' if text.face.muted else ""
    return (
        f'<text class="ink" x="{number(text.x)}" y="{number(text.y)}" '
        f'font-size="{number(text.face.size)}" text-anchor="{text.anchor}" '
        f'textLength="{number(text.width)}" lengthAdjust="spacingAndGlyphs" '
        f'fill="{INK["light"]}"{style}>{escape(text.words)}</text>'
    )


def svg_frame(frame: Frame) -> str:
    colour, box = role_colour(frame.role), frame.box
    return (
        f'<rect x="{number(box.x)}" y="{number(box.y)}" width="{number(box.w)}" '
        f'height="{number(box.h)}" rx="10" fill="{colour}" fill-opacity="{GROUND}" '
        f'stroke="{colour}" stroke-opacity="0.35"/>' + svg_text(title_at(frame))
    )


def svg_edge(edge: Edge) -> str:
    colour = role_colour(edge.role)
    style = f'stroke="{colour}" stroke-width="{number(line_width(edge))}" fill="none"'
    style += ' stroke-dasharray="5 4"' if edge.dashed else ""
    arrow = ends_in_arrow(edge)
    shapes = []
    for path in edge.paths:
        shapes.append(
            f'<path d="{svg_path(shortened(path, head_length(edge)) if arrow else path)}" {style}/>'
        )
        if arrow:
            corners = " ".join(
                f"{number(x)},{number(y)}" for x, y in head_of(path, head_length(edge))
            )
            shapes.append(f'<polygon points="{corners}" fill="{colour}"/>')
    faint = ' opacity="0.4"' if edge.faint else ""
    return f"<g{faint}>{''.join(shapes)}</g>"


def svg_path(path: list[Point]) -> str:
    def at(point: Point) -> str:
        return f"{number(point[0])} {number(point[1])}"

    curves = [f"L{at(a)}Q{at(corner)} {at(b)}" for a, corner, b in bends(path)]
    return f"M{at(path[0])}{''.join(curves)}L{at(path[-1])}"


def svg_node(node: Node) -> str:
    colour, box = role_colour(node.role), node.box
    (x, y), r = box.middle, box.w / 2
    if node.kind == "dot":
        return f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(r)}" fill="{colour}"/>'
    if node.kind == "add":
        inside = (
            f'<circle class="paper" cx="{number(x)}" cy="{number(y)}" r="{number(r)}" '
            f'fill="{PAPER["light"]}" stroke="{colour}" stroke-width="2.5"/>'
            f'<path class="line" d="M{number(x - 6)} {number(y)}H{number(x + 6)}'
            f'M{number(x)} {number(y - 6)}V{number(y + 6)}" stroke="{INK["light"]}" '
            'stroke-width="2" fill="none"/>'
        )
    else:
        inside = svg_box(node, colour) + "".join(svg_text(text) for text in node.texts())
    label = escape(", ".join(node.lines))
    return f'<g class="node" data-node="{escape(node.name)}" aria-label="{label}">{inside}</g>'


def svg_box(node: Node, colour: str) -> str:
    if node.kind == "bare":
        return ""
    box = node.box
    rect = (
        f'<rect class="box" x="{number(box.x)}" y="{number(box.y)}" width="{number(box.w)}" '
        f'height="{number(box.h)}" rx="{CORNER}" fill="{colour}" fill-opacity="{TINT}" '
        f'stroke="{colour}" stroke-width="1.5"/>'
    )
    if node.share is None:
        return rect
    x, y, width, height = bar(node)
    for share, opacity in ((1, 0.18), (node.share, 1)):
        rect += (
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(width * share)}" '
            f'height="{number(height)}" fill="{colour}" fill-opacity="{opacity}"/>'
        )
    return rect


# -- PNG ------------------------------------------------------------------------------------


def png(grid: Grid, scale: float, note: str) -> bytes:
    """The diagram as PNG, `scale` pixels for one of the SVG; `note` goes into a text chunk."""
    w, h = grid.size
    fig = Figure(figsize=(w / 100, h / 100), dpi=100 * scale, facecolor=PAPER["light"])
    FigureCanvasAgg(fig)
    ax = fig.add_axes((0, 0, 1, 1), xlim=(0, w), ylim=(h, 0))
    ax.set_axis_off()
    for frame in grid.frames:
        paint_box(ax, frame.box, role_colour(frame.role), GROUND, 0.35, 10, 1)
        paint_text(ax, title_at(frame))
    for edge in grid.edges:
        paint_edge(ax, edge)
    for node in grid.nodes:
        paint_node(ax, node)
    for text in [text for edge in grid.edges for text in edge.texts]:
        paint_text(ax, text)
    fig.canvas.draw()
    picture = Image.fromarray(np.asarray(fig.canvas.buffer_rgba())[..., :3].copy())
    chunk = PngInfo()
    chunk.add_text(CHUNK, note)
    buffer = io.BytesIO()
    # a palette: flat colours need no more, and the stored notebook is a third of the size
    picture.quantize(PALETTE, dither=Image.Dither.NONE).save(buffer, "PNG", pnginfo=chunk)
    return buffer.getvalue()


def points(pixels: float) -> float:
    """Line widths in pixels of the SVG, as matplotlib wants them on a figure of dpi 100."""
    return pixels * 0.72


def paint_text(ax, text: Text):
    outline = TextPath((0, 0), text.words, size=text.face.size, prop=text.face.properties)
    shift = text.width * {"start": 0, "middle": 0.5, "end": 1}[text.anchor]
    moved = Affine2D().scale(CONDENSED, -1).translate(text.x - shift, text.y)
    alpha = MUTED if text.face.muted else 1
    patch = PathPatch(moved.transform_path(outline), fc=INK["light"], ec="none", alpha=alpha)
    ax.add_patch(patch)


def paint_box(ax, box, colour: str, tint: float, line: float, corner: float, width: float):
    round_box = f"round,pad=0,rounding_size={corner}"
    for fill, alpha in ((True, tint), (False, line)):
        ax.add_patch(
            FancyBboxPatch(
                (box.x, box.y),
                box.w,
                box.h,
                boxstyle=round_box,
                fc=colour if fill else "none",
                ec="none" if fill else colour,
                lw=points(width),
                alpha=alpha,
            )
        )


def paint_edge(ax, edge: Edge):
    colour, alpha = role_colour(edge.role), 0.4 if edge.faint else 1
    dashes = (0, (4.5, 3.5)) if edge.dashed else "-"
    style = dict(fc="none", ec=colour, alpha=alpha, ls=dashes, capstyle="butt")
    for path in edge.paths:
        arrow = ends_in_arrow(edge)
        curve = curved(shortened(path, head_length(edge)) if arrow else path)
        ax.add_patch(PathPatch(curve, lw=points(line_width(edge)), **style))
        if arrow:
            ax.add_patch(
                Polygon(head_of(path, head_length(edge)), fc=colour, ec="none", alpha=alpha)
            )


def curved(path: list[Point]) -> Path:
    corners, codes = [path[0]], [Path.MOVETO]
    for a, corner, b in bends(path):
        corners += [a, corner, b]
        codes += [Path.LINETO, Path.CURVE3, Path.CURVE3]
    return Path([*corners, path[-1]], [*codes, Path.LINETO])


def paint_node(ax, node: Node):
    colour, (x, y) = role_colour(node.role), node.box.middle
    if node.kind == "dot":
        ax.add_patch(Circle((x, y), node.box.w / 2, fc=colour, ec="none"))
        return
    if node.kind == "add":
        ax.add_patch(Circle((x, y), 12, fc=PAPER["light"], ec=colour, lw=points(2.5)))
        plus = Path(
            [(x - 6, y), (x + 6, y), (x, y - 6), (x, y + 6)],
            [Path.MOVETO, Path.LINETO, Path.MOVETO, Path.LINETO],
        )
        ax.add_patch(PathPatch(plus, ec=INK["light"], fc="none", lw=points(2)))
        return
    if node.kind != "bare":
        paint_box(ax, node.box, colour, TINT, 1, CORNER, 1.5)
    if node.share is not None:
        left, top, width, height = bar(node)
        for share, alpha in ((1, 0.18), (node.share, 1)):
            corners = [(left, top), (left + width * share, top)]
            corners += [(left + width * share, top + height), (left, top + height)]
            ax.add_patch(Polygon(corners, fc=colour, ec="none", alpha=alpha))
    for text in node.texts():
        paint_text(ax, text)
