"""Panels drawn by matplotlib: the stored picture, where no kernel and no browser widget runs."""

import io
import re
import textwrap
from dataclasses import dataclass
from itertools import pairwise

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, MaxNLocator

from course_lib.teaching import theme
from course_lib.teaching.panels import (
    Bars,
    Heat,
    Lines,
    Note,
    Panel,
    Picture,
    compact,
    row_heights,
)
from course_lib.teaching.wire import texts_of

INK, FAINT, LINE = theme.INK["light"], "#57606a", "#9aa1ab"
FONT = 9.5  # points, 13 pixels on a page of 100 dots an inch
CHARACTER, BOLD_CHARACTER, TEXT_LINE = 7.9, 8.6, 19  # pixels
GAP, TILE_GAP = 30, 12  # between panels of a row, between tiles of a heat map
COLOURMAPS = {"sequential": theme.SEQUENTIAL, "diverging": theme.DIVERGING}
HALO = withStroke(linewidth=3, foreground=theme.PAPER["light"])
STYLE = theme.STYLE | {
    name: FONT
    for name in ("font.size", "axes.labelsize", "xtick.labelsize", "ytick.labelsize")
    + ("legend.fontsize",)
}


@dataclass(frozen=True)
class Box:
    """A rectangle on the figure in pixels of the page, from the upper left corner."""

    fig: Figure
    x: float
    y: float
    w: float
    h: float

    def shrunk(self, left: float = 0, top: float = 0, right: float = 0, bottom: float = 0):
        w, h = max(20, self.w - left - right), max(20, self.h - top - bottom)
        return Box(self.fig, self.x + left, self.y + top, w, h)

    def axes(self) -> Axes:
        width, height = self.fig.get_size_inches() * theme.DPI
        bottom = 1 - (self.y + self.h) / height
        return self.fig.add_axes([self.x / width, bottom, self.w / width, self.h / height])

    def write(self, x: float, y: float, text: str, **how):
        width, height = self.fig.get_size_inches() * theme.DPI
        self.fig.text((self.x + x) / width, 1 - (self.y + y) / height, text, **how)


def text_width(texts) -> float:
    return CHARACTER * max((len(text) for text in texts), default=0)


def png(rows: list[list[Panel]], width: int, height: int, message: str = "") -> bytes:
    """Rows of panels as PNG; a message (why there is no newer picture) stands at the top."""
    return theme.png_of(draw(rows, width, height, message))


def draw(rows: list[list[Panel]], width: int, height: int, message: str = "") -> Figure:
    """Rows of panels on a figure; sizes in pixels of the page."""
    heights = row_heights(rows, height) if rows else []
    said = textwrap.wrap(message, int(width / CHARACTER) - 4)
    y = TEXT_LINE * len(said) + 8 * bool(said)
    size = (width / theme.DPI, (y + sum(heights) + 6) / theme.DPI)
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=size, dpi=theme.DPI)
        FigureCanvasAgg(fig)
        page = Box(fig, 8, 6, width - 16, size[1] * theme.DPI - 6)
        page.write(0, 0, "\n".join(said), va="top", color=INK, linespacing=1.5)
        for row, row_height in zip(rows, heights, strict=True):
            draw_row(Box(fig, page.x, page.y + y, page.w, row_height), row)
            y += row_height
    return fig


def draw_row(box: Box, row: list[Panel]):
    shares = np.array([panel.width for panel in row])
    widths = (box.w - GAP * (len(row) - 1)) * shares / shares.sum()
    x = box.x
    for panel, width in zip(row, widths, strict=True):
        place = Box(box.fig, x, box.y, width, box.h - 10)
        title = textwrap.wrap(panel.title, max(12, int(width / BOLD_CHARACTER)))
        place.write(0, 0, "\n".join(title), va="top", weight="bold", color=INK, linespacing=1.35)
        DRAW[type(panel)](place.shrunk(top=TEXT_LINE * len(title) + 6), panel)
        x += width + GAP


def name_axes(ax: Axes, box: Box, below: float, panel):
    """The names of both axes at the edge of the panel's box, clear of tick labels."""
    frame = ax.bbox.transformed(ax.figure.transFigure.inverted())
    height = ax.figure.get_size_inches()[1] * theme.DPI
    middle = (1 - (frame.y0 + frame.y1) / 2) * height - box.y
    how = {"color": FAINT, "rotation": 90, "va": "center", "ha": "left"}
    box.write(0, middle, panel.ylabel, **how)
    bottom = (1 - frame.y0) * height - box.y + below
    width = ax.figure.get_size_inches()[0] * theme.DPI
    centre = (frame.x0 + frame.x1) / 2 * width - box.x
    box.write(centre, bottom, panel.xlabel, color=FAINT, va="top", ha="center")


def plan_labels(labels: list[str], named: bool, cell: float) -> tuple[int, bool, float]:
    """Every how many labels are written, whether slanted, and the pixels that they take."""
    most = text_width(labels)
    written = [i for i, label in enumerate(labels) if label]
    apart = min((b - a for a, b in pairwise(written)), default=len(labels))
    if most + 6 <= cell * apart:  # an empty label leaves its room to its neighbours
        return 1, False, TEXT_LINE
    if named and cell >= 13:
        return 1, True, 0.71 * most + 12
    every = -(-int(most + 10) // max(1, int(cell)))
    nice = [n for n in (1, 2, 5, 10, 20, 25, 50, 100, 200, 500) if n >= every]
    return (every if named or not nice else nice[0]), False, TEXT_LINE


def label_axis(ax: Axes, labels: list[str], every: int, slanted: bool, offset: float):
    at = np.arange(0, len(labels), every)
    ax.set_xticks(at + offset, [labels[i] for i in at])
    ax.tick_params(axis="x", length=0, pad=4)
    if slanted:
        for label in ax.get_xticklabels():
            label.set(rotation=45, ha="right", va="top", rotation_mode="anchor")


# -- heat map -------------------------------------------------------------------------------------


def draw_heat(box: Box, panel: Heat):
    tiles = panel.values if panel.values.ndim == 3 else panel.values[None]
    hidden = np.zeros(tiles.shape, bool)
    if panel.hidden is not None:
        hidden = panel.hidden.reshape(tiles.shape)
    if hidden.any():
        add_swatch(box, panel.hidden_label)
        box = box.shrunk(top=TEXT_LINE)
    limits = [compact(value) for value in panel.limits]
    inner = box.shrunk(right=text_width(limits) + 28, left=TEXT_LINE * bool(panel.ylabel))
    if panel.values.ndim == 3:
        used = draw_tiles(inner.shrunk(bottom=TEXT_LINE * bool(panel.xlabel)), panel, tiles, hidden)
    else:
        used = draw_cells(inner, panel, tiles[0], hidden[0])
    add_scale(used, panel, limits)


def draw_cells(box: Box, panel: Heat, values: np.ndarray, hidden: np.ndarray) -> Box:
    """One map with its ticks; returns the box of its cells."""
    rows, columns = values.shape
    yticks = panel.yticks or [str(i) for i in range(rows)]
    xticks = panel.xticks or [str(i) for i in range(columns)]
    frame = box.shrunk(left=text_width(yticks) + 6)
    square = panel.square if panel.square is not None else rows == columns
    cell = frame.w / columns
    for _ in range(2):  # the height that labels leave depends on how they stand
        every, slanted, below = plan_labels(xticks, panel.xticks is not None, cell)
        high = frame.h - below - TEXT_LINE * bool(panel.xlabel)
        cell = min(frame.w / columns, high / rows) if square else frame.w / columns
    w, h = cell * columns, (cell * rows if square else high)
    frame = Box(box.fig, frame.x, frame.y, w, h)
    ax = frame.axes()
    paint(ax, panel, values, hidden, 0, cell, h / rows)
    label_axis(ax, xticks, every, slanted, 0.5)
    low = bool(panel.yticks) and 12.5 <= h / rows < TEXT_LINE - 4  # all names, a little smaller
    y_every = 1 if low else max(1, -int(-(TEXT_LINE - 4) // max(1e-9, h / rows)))
    at = np.arange(0, rows, y_every)
    size = min(FONT, 0.72 * h / rows) if low else FONT
    ax.set_yticks(at + 0.5, [yticks[i] for i in at], fontsize=size)
    ax.tick_params(axis="y", length=0, pad=4)
    name_axes(ax, Box(box.fig, box.x - TEXT_LINE, box.y, box.w, box.h), below + 2, panel)
    return frame


def draw_tiles(box: Box, panel: Heat, tiles: np.ndarray, hidden: np.ndarray) -> Box:
    """Several maps side by side, each under its name; returns the box of them all."""
    n, rows, columns = tiles.shape
    head = TEXT_LINE + 4
    across = tiles_across(n, rows, columns, box.w, box.h, head)
    down = -(-n // across)
    w = (box.w - TILE_GAP * (across - 1)) / across
    h = (box.h - head * down) / down
    if panel.square if panel.square is not None else rows == columns:
        cell = min(w / columns, h / rows)
        w, h = cell * columns, cell * rows
    names = tile_names(panel.names, w + TILE_GAP)
    for i in range(n):
        x = box.x + (i % across) * (w + TILE_GAP)
        y = box.y + head + (i // across) * (h + head)
        place = Box(box.fig, x, y, w, h)
        ax = place.axes()
        paint(ax, panel, tiles[i], hidden[i], i, w / columns, h / rows)
        ax.set(xticks=[], yticks=[])
        place.write(0, -4, names[i], va="bottom", color=INK)
    width, height = across * (w + TILE_GAP) - TILE_GAP, down * (h + head) - head
    total = Box(box.fig, box.x, box.y + head, width, height)
    total.write(total.w / 2, total.h + 2, panel.xlabel, color=FAINT, va="top", ha="center")
    total.write(-TEXT_LINE, total.h / 2, panel.ylabel, color=FAINT, rotation=90, va="center")
    return total


def tile_names(names: list[str], width: float) -> list[str]:
    """The names, or their numbers where "h 12" does not fit on a tile."""
    numbers = [re.fullmatch(r"\D+(\d+)", name) for name in names]
    if text_width(names) <= width or not all(numbers):
        return names
    return [number[1] for number in numbers]


def tiles_across(n: int, rows: int, columns: int, width: float, height: float, head: float) -> int:
    """How many tiles stand side by side, so that their cells come out largest."""
    most, best = -np.inf, 1
    for across in range(1, n + 1):
        down = -(-n // across)
        wide = (width - TILE_GAP * (across - 1)) / (across * columns)
        cell = min(wide, (height - head * down) / (down * rows))
        if cell > most + 1e-9:
            most, best = cell, across
    return best


def paint(ax: Axes, panel: Heat, values, hidden, tile: int, cell_w: float, cell_h: float):
    """The cells of one map, hatched where hidden, with values where they fit, and the mark."""
    rows, columns = values.shape
    low, high = panel.limits
    cmap = COLOURMAPS[panel.scale].with_extremes(bad=theme.MASKED["light"])
    shown = np.ma.masked_array(values, hidden)
    where = (0, columns, rows, 0)
    ax.imshow(
        shown, cmap=cmap, vmin=low, vmax=high, extent=where, interpolation="nearest", aspect="auto"
    )
    hatch_cells(ax, hidden)
    for spine in ax.spines.values():
        spine.set(visible=True, edgecolor=LINE, linewidth=0.8)
    texts = texts_of(panel)
    if texts and text_width(texts) + 4 <= cell_w and cell_h >= 15:
        write_cells(ax, panel, texts[tile * values.size :], shown)
    if panel.mark is not None and panel.mark_tile in (None, tile):
        row, column = panel.mark
        for colour, width in ((theme.PAPER["light"], 4), (INK, 2)):
            ax.add_patch(Rectangle((column, row), 1, 1, fill=False, ec=colour, lw=width, zorder=5))


def hatch_cells(ax: Axes, hidden: np.ndarray):
    """Hatch hidden cells, one rectangle for each run of a row."""
    for r, row in enumerate(hidden):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], row.astype(int), [0]))))
        for start, stop in edges.reshape(-1, 2):
            patch = {"fill": False, "hatch": "////", "linewidth": 0}
            ax.add_patch(Rectangle((start, r), stop - start, 1, **patch))


def write_cells(ax: Axes, panel: Heat, texts: list[str], shown):
    low, high = panel.limits
    mask, columns = np.ma.getmaskarray(shown), shown.shape[1]
    for (r, c), value in np.ndenumerate(shown.data):
        if mask[r, c]:
            continue
        red, green, blue, _ = COLOURMAPS[panel.scale]((value - low) / (high - low))
        bright = 0.299 * red + 0.587 * green + 0.114 * blue > 0.55
        colour = INK if bright else theme.PAPER["light"]
        ax.text(
            c + 0.5,
            r + 0.5,
            texts[r * columns + c],
            ha="center",
            va="center_baseline",
            color=colour,
        )


def add_scale(cells: Box, panel: Heat, limits: list[str]):
    """A bar of the colours beside the cells, with both ends of the range."""
    if cells.h < 2 * TEXT_LINE:
        return  # no room for its two numbers
    bar = Box(cells.fig, cells.x + cells.w + 12, cells.y, 10, cells.h)
    ax = bar.axes()
    ramp = np.linspace(1, 0, 128)[:, None]
    ax.imshow(ramp, cmap=COLOURMAPS[panel.scale], aspect="auto", extent=(0, 1, 0, 1))
    ax.set(xticks=[], yticks=[])
    for spine in ax.spines.values():
        spine.set(visible=True, edgecolor=LINE, linewidth=0.8)
    bar.write(15, 0, limits[1], color=FAINT, va="top")
    bar.write(15, bar.h, limits[0], color=FAINT, va="bottom")


def add_swatch(box: Box, label: str):
    swatch = Box(box.fig, box.x + TEXT_LINE, box.y + 1, 14, 12).axes()
    swatch.add_patch(
        Rectangle((0, 0), 1, 1, facecolor=theme.MASKED["light"], hatch="////", linewidth=0)
    )
    swatch.axis("off")
    box.write(TEXT_LINE + 20, 7, label, color=FAINT, va="center")


# -- bars and lines -------------------------------------------------------------------------------


def draw_bars(box: Box, panel: Bars):
    stacked = panel.values if panel.values.ndim == 2 else panel.values[None]
    totals = np.nan_to_num(stacked.sum(0))  # NaN, where there is no value, has no height
    handles = bar_handles(panel)
    limits = panel.limits or bar_limits(totals, panel.reference)
    counts = bool((totals == totals.round()).all())
    ticks = [
        t
        for t in MaxNLocator(5, integer=counts).tick_values(*limits)
        if limits[0] <= t <= limits[1]
    ]
    left = text_width(map(compact, ticks)) + 8 + TEXT_LINE * bool(panel.ylabel)
    numbered = all(label.isdigit() for label in panel.labels)
    if plan_labels(panel.labels, not numbered, (box.w - left) / len(panel.labels))[1]:
        left = max(left, 0.71 * text_width(panel.labels[:1]))
    cell = (box.w - left) / len(panel.labels)
    every, slanted, below = plan_labels(panel.labels, not numbered, cell)
    bottom = below + 4 + TEXT_LINE * bool(panel.xlabel)
    ax = box.shrunk(left=left, top=(TEXT_LINE + 2) * bool(handles) + 6, bottom=bottom).axes()
    fill_bars(ax, panel, stacked)
    ax.set(ylim=limits, yticks=ticks, xlim=(-0.5, len(totals) - 0.5))
    label_axis(ax, panel.labels, every, slanted, 0)
    finish(ax, box, panel, below + 4, handles)
    texts = texts_of(panel)
    if texts and text_width(texts) <= cell:
        for x, (top, text) in enumerate(zip(totals, texts, strict=True)):
            va = "bottom" if top >= 0 else "top"
            ax.text(x, top, text, ha="center", va=va, color=INK, path_effects=[HALO], zorder=4)
    if panel.reference is not None:
        ax.axhline(panel.reference, color=INK, linestyle=(0, (5, 3)), linewidth=1.4)
    if panel.mark is not None:
        corner, height = (panel.mark - 0.4, min(0, totals[panel.mark])), abs(totals[panel.mark])
        ax.add_patch(Rectangle(corner, 0.8, height, fill=False, edgecolor=INK, linewidth=2))


def bar_limits(totals: np.ndarray, reference: float | None) -> tuple[float, float]:
    low, high = min(0.0, float(totals.min())), max(0.0, float(totals.max()), reference or 0.0)
    return low * 1.12, (high or (1e-12 if low == 0 else 0.0)) * 1.12


def fill_bars(ax: Axes, panel: Bars, stacked: np.ndarray):
    colours = [theme.role_colour(role) for role in panel.roles]
    at, floor = np.arange(stacked.shape[1]), np.zeros(stacked.shape[1])
    for i, values in enumerate(stacked):
        colour = colours[i] if panel.values.ndim == 2 else colours
        edges = {"edgecolor": theme.PAPER["light"], "linewidth": 0.8}
        ax.bar(at, values, bottom=floor, color=colour, width=0.8, **edges)
        floor = floor + values
    ax.axhline(0, color=LINE, linewidth=0.8)


def bar_handles(panel: Bars) -> list:
    handles = [
        Patch(facecolor=theme.role_colour(role), label=name)
        for role, name in zip(panel.roles, panel.names or (), strict=False)
    ]
    if panel.reference is not None and panel.reference_label:
        dashed = {"color": INK, "linestyle": (0, (5, 3)), "linewidth": 1.4}
        handles.append(Line2D([], [], label=panel.reference_label, **dashed))
    return handles


def finish(ax: Axes, box: Box, panel, below: float, handles: list):
    """Grid, names of the axes, and the legend in a line above the plot."""
    ax.grid(axis="y")
    ax.tick_params(length=0)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="both", labelcolor=FAINT)
    if not getattr(panel, "ylog", False):
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    name_axes(ax, box, below, panel)
    if handles:
        place = {"loc": "lower right", "bbox_to_anchor": (1, 1.0), "borderaxespad": 0.3}
        ax.legend(handles=handles, ncols=len(handles), handlelength=1.6, columnspacing=1.2, **place)


def draw_lines(box: Box, panel: Lines):
    many, marked = len(panel.curves) > 1, bool(panel.marks)
    top = TEXT_LINE * (many + marked) + 6
    left = 46 + TEXT_LINE * bool(panel.ylabel)
    bottom = TEXT_LINE * (1 + bool(panel.xlabel)) + 4
    ax = box.shrunk(left=left, top=top, right=8, bottom=bottom).axes()
    styles, handles = ("-", "--", "-.", ":"), []
    for i, (name, y) in enumerate(panel.curves.items()):
        look = {"color": theme.role_colour(panel.roles[i]), "linestyle": styles[i % 4]}
        if len(panel.x) > box.w - left - 8 and np.isfinite(y).all():
            handles += fill_band(ax, panel, y, box.w - left - 8, name, look["color"])
            continue
        handles += ax.plot(
            panel.x, y, label=name, marker="o" if panel.dots else None, markersize=4, **look
        )
    ax.set(xscale="log" if panel.xlog else "linear", yscale="log" if panel.ylog else "linear")
    if panel.xlimits:
        ax.set_xlim(*panel.xlimits)
    if panel.limits:
        ax.set_ylim(*panel.limits)
    for label, x in panel.marks.items():
        ax.axvline(x, color=INK, linestyle=(0, (2, 2)), linewidth=1.2)
        at = {"xy": (x, 1), "xycoords": ("data", "axes fraction"), "ha": "center"}
        ax.annotate(label, **at, xytext=(0, 3), textcoords="offset points", color=INK)
    ax.grid(axis="x")
    if not panel.xlog:
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    finish(ax, box, panel, TEXT_LINE + 4, [])
    if many:
        place = {"loc": "lower right", "bbox_to_anchor": (1, 1 + 0.0), "borderaxespad": 0.3}
        lift = TEXT_LINE / (box.h - top - bottom) if marked else 0
        place["bbox_to_anchor"] = (1, 1 + lift)
        ax.legend(handles=handles, ncols=len(handles), handlelength=2.2, columnspacing=1.2, **place)


def fill_band(ax: Axes, panel: Lines, y: np.ndarray, width: float, name: str, colour: str) -> list:
    """A curve of more points than pixels, without a gap: in each column of two pixels from the
    lowest to the highest."""
    x = np.log(panel.x) if panel.xlog else panel.x
    column = ((x - x[0]) / (x[-1] - x[0]) * width / 2).astype(int)
    column = np.minimum(column, column[-1] - 1)  # the last one takes what is left over, too
    first = np.flatnonzero(np.diff(column, prepend=-1))  # of each column; x rises
    before = y[np.maximum(first - 1, 0)]  # a column begins where the one before it ends
    low = np.minimum(np.minimum.reduceat(y, first), before)
    high = np.maximum(np.maximum.reduceat(y, first), before)
    at = panel.x[first]
    ax.fill_between(at, low, high, color=colour, alpha=0.25, linewidth=0)
    edge = {"color": colour, "linewidth": 1.4, "solid_joinstyle": "round"}
    ax.plot(at, low, **edge)
    return ax.plot(at, high, label=name, **edge)


# -- text and diagrams ----------------------------------------------------------------------------


def draw_note(box: Box, panel: Note):
    how = {"va": "top", "family": "DejaVu Sans Mono", "fontsize": 9, "color": INK}
    box.write(0, 0, panel.text, linespacing=1.45, **how)


def draw_picture(box: Box, panel: Picture):
    ax = box.axes()
    ax.axis("off")
    if panel.png is None:
        box.write(box.w / 2, box.h / 2, "a diagram, shown where the notebook runs", ha="center")
        return
    ax.imshow(imread(io.BytesIO(panel.png()), format="png"), interpolation="antialiased")


DRAW = {
    Heat: draw_heat,
    Bars: draw_bars,
    Lines: draw_lines,
    Note: draw_note,
    Picture: draw_picture,
}
