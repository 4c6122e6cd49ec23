"""Panels drawn by matplotlib: the stored picture, where no kernel and no browser widget runs."""

import io
import textwrap

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from course_lib.teaching import theme
from course_lib.teaching.panels import Bars, Heat, Lines, Note, Panel, Picture, row_heights
from course_lib.teaching.wire import texts_of

INK = theme.INK["light"]
CHARACTER = 7.4  # pixels that one character of a title takes
MOST_TICKS = 16
COLOURMAPS = {"sequential": theme.SEQUENTIAL, "diverging": theme.DIVERGING}


def png(rows: list[list[Panel]], width: int, height: int, message: str = "") -> bytes:
    """Rows of panels as PNG; a message (why there is no newer picture) stands at the top."""
    return theme.png_of(draw(rows, width, height, message))


def draw(rows: list[list[Panel]], width: int, height: int, message: str = "") -> Figure:
    """Rows of panels on a figure; sizes in pixels on the page."""
    heights = row_heights(rows, height) if rows else [60]
    with matplotlib.rc_context(theme.STYLE):
        size = (width / theme.DPI, sum(heights) / theme.DPI)
        fig = Figure(figsize=size, dpi=theme.DPI, layout="constrained")
        FigureCanvasAgg(fig)
        if message:
            fig.suptitle("\n".join(textwrap.wrap(message, 110)), fontsize=10.5, x=0.01, ha="left")
        if rows:
            strips = fig.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)[:, 0]
            for strip, row in zip(strips, rows, strict=True):
                draw_row(strip, row, width)
        return fig


def draw_row(strip, row: list[Panel], width: int):
    shares = [panel.width for panel in row]
    axes = strip.subplots(1, len(row), width_ratios=shares, squeeze=False)[0]
    for ax, panel in zip(axes, row, strict=True):
        characters = int(width * panel.width / sum(shares) / CHARACTER)
        ax.set_title("\n".join(textwrap.wrap(panel.title, max(12, characters))))
        DRAW[type(panel)](ax, panel)


def draw_heat(ax: Axes, panel: Heat):
    tiles = panel.values if panel.values.ndim == 3 else panel.values[None]
    hidden = np.zeros(tiles.shape, bool) if panel.hidden is None else panel.hidden
    hidden = hidden.reshape(tiles.shape)
    n, rows, columns = tiles.shape
    across = tiles_across(n, rows, columns, ax.get_position().width / ax.get_position().height)
    # on the page the gap between tiles must hold a name of one line
    gap_x, gap_y = max(1.0, columns * 0.08), max(1.5, rows * 0.2)
    for i in range(n):
        left = (i % across) * (columns + gap_x)
        top = (i // across) * (rows + gap_y)
        draw_tile(ax, panel, tiles[i], hidden[i], left, top)
        if n > 1:
            ax.text(left, top - 0.03 * rows, panel.names[i], va="bottom", fontsize=10)
    down = -(-n // across)
    ax.set_xlim(0, across * (columns + gap_x) - gap_x)
    ax.set_ylim(down * (rows + gap_y) - gap_y, 0)
    square = panel.square if panel.square is not None else rows == columns
    ax.set_aspect("equal" if square else "auto", anchor="NW")
    label_cells(ax, panel, n, rows, columns)
    draw_mark(ax, panel, across, gap_x, gap_y)
    add_scale(ax, panel, bool(hidden.any()))


def tiles_across(n: int, rows: int, columns: int, ratio: float) -> int:
    """How many tiles stand side by side, so that they come out largest in width / height."""
    fits = [min(ratio / (c * columns), 1 / (-(-n // c) * rows)) for c in range(1, n + 1)]
    return int(np.argmax(fits)) + 1


def draw_tile(ax: Axes, panel: Heat, values, hidden, left: float, top: float):
    rows, columns = values.shape
    where = (left, left + columns, top + rows, top)
    shown = np.ma.masked_array(values, hidden)
    low, high = panel.limits
    cmap = COLOURMAPS[panel.scale].with_extremes(bad=theme.MASKED["light"])
    ax.imshow(shown, cmap=cmap, vmin=low, vmax=high, extent=where, interpolation="nearest")
    if hidden.any():
        hatch_cells(ax, hidden, left, top)
    frame = {"fill": False, "edgecolor": "#9aa1ab", "linewidth": 0.8}
    ax.add_patch(Rectangle((left, top), columns, rows, **frame))
    texts = texts_of(panel)
    if texts and values.size <= 150:
        write_cells(ax, panel, texts, shown, left, top)


def hatch_cells(ax: Axes, hidden, left: float, top: float):
    """Hatch runs of hidden cells, a rectangle for each run of a row."""
    for r, row in enumerate(hidden):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], row.astype(int), [0]))))
        for start, stop in edges.reshape(-1, 2):
            corner = (left + start, top + r)
            ax.add_patch(Rectangle(corner, stop - start, 1, fill=False, hatch="////", linewidth=0))


def write_cells(ax: Axes, panel: Heat, texts: list[str], shown, left: float, top: float):
    low, high = panel.limits
    for (r, c), value in np.ndenumerate(shown.data):
        if shown.mask is not np.ma.nomask and shown.mask[r, c]:
            continue
        share = (value - low) / (high - low)
        dark = share > 0.55 if panel.scale == "sequential" else abs(share - 0.5) > 0.35
        colour = theme.PAPER["light"] if dark else INK
        text = texts[r * shown.shape[1] + c]
        ax.text(left + c + 0.5, top + r + 0.5, text, ha="center", va="center", color=colour)


def label_cells(ax: Axes, panel: Heat, n: int, rows: int, columns: int):
    ax.set_xlabel(panel.xlabel)
    ax.set_ylabel(panel.ylabel)
    for axis, length, labels in (
        (ax.xaxis, columns, panel.xticks),
        (ax.yaxis, rows, panel.yticks),
    ):
        if n > 1:  # the names of the tiles stand in for ticks
            axis.set_ticks([])
            continue
        step = -(-length // MOST_TICKS)
        at = np.arange(0, length, step)
        axis.set_ticks(at + 0.5, [labels[i] if labels else str(i) for i in at])
        axis.set_tick_params(length=0)
        if axis is ax.xaxis and labels and max(map(len, labels)) * len(at) > 40:
            ax.tick_params(axis="x", rotation=45)
            for label in ax.get_xticklabels():
                label.set(ha="right", rotation_mode="anchor")
    ax.spines[:].set_visible(False)


def draw_mark(ax: Axes, panel: Heat, across: int, gap_x: float, gap_y: float):
    if panel.mark is None:
        return
    tile, (row, column) = panel.mark_tile or 0, panel.mark
    left = (tile % across) * (panel.values.shape[-1] + gap_x)
    top = (tile // across) * (panel.values.shape[-2] + gap_y)
    corner = (left + column, top + row)
    ax.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=INK, linewidth=2))


def add_scale(ax: Axes, panel: Heat, any_hidden: bool):
    bar = ax.figure.colorbar(ax.images[0], ax=ax, fraction=0.04, pad=0.02, aspect=30)
    bar.set_ticks(sorted({*panel.limits, 0.0} if panel.scale == "diverging" else panel.limits))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    bar.outline.set_visible(False)
    if any_hidden:
        swatch = Patch(
            facecolor=theme.MASKED["light"], hatch="////", linewidth=0, label=panel.hidden_label
        )
        place = {"loc": "upper right", "bbox_to_anchor": (1, -0.02), "borderpad": 0}
        ax.legend(handles=[swatch], handlelength=1.2, **place)


def draw_bars(ax: Axes, panel: Bars):
    stacked = panel.values if panel.values.ndim == 2 else panel.values[None]
    colours = [theme.role_colour(role) for role in panel.roles]
    at, floor = np.arange(len(panel.labels)), np.zeros(len(panel.labels))
    for i, values in enumerate(stacked):
        colour = colours[i] if panel.values.ndim == 2 else colours
        label = panel.names[i] if panel.names else None
        edges = {"edgecolor": theme.PAPER["light"], "linewidth": 0.8}
        ax.bar(at, values, bottom=floor, color=colour, label=label, width=0.8, **edges)
        floor = floor + values
    if panel.limits:
        ax.set_ylim(*panel.limits)
    else:
        low = min(0.0, float(floor.min()))
        ax.set_ylim(low * 1.12, max(float(floor.max()), panel.reference or 0, 1e-12) * 1.15)
    write_bars(ax, panel, at, floor)
    step = -(-len(at) // MOST_TICKS)
    ax.set_xticks(at[::step], panel.labels[::step])
    ax.tick_params(axis="x", length=0)
    ax.set_xlim(-0.6, len(at) - 0.4)
    ax.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
    ax.grid(axis="y")
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    if panel.mark is not None:
        ax.get_xticklabels()[panel.mark // step].set_fontweight("bold")
    if panel.reference is not None:
        label = panel.reference_label or None
        ax.axhline(panel.reference, color=INK, linestyle=(0, (5, 3)), linewidth=1.4, label=label)
    if panel.names or panel.reference_label:
        ax.legend(loc="upper right", ncols=min(4, len(stacked) + 1))


def write_bars(ax: Axes, panel: Bars, at, tops):
    texts = texts_of(panel)
    if not texts or len(at) > MOST_TICKS:
        return
    for x, top, text in zip(at, tops, texts, strict=True):
        side = "bottom" if top >= 0 else "top"
        ax.text(x, top, text, ha="center", va=side, fontsize=10, color=INK)


def compact(value: float) -> str:
    """1,500,000 as 1.5M: short enough for a tick."""
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9999:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def draw_lines(ax: Axes, panel: Lines):
    styles = ("-", "--", "-.", ":")
    for i, (name, y) in enumerate(panel.curves.items()):
        colour, marker = theme.role_colour(panel.roles[i]), "o" if panel.dots else None
        style = {"color": colour, "marker": marker, "markersize": 4, "linestyle": styles[i % 4]}
        ax.plot(panel.x, y, label=name, **style)
    if panel.xlog:
        ax.set_xscale("log")
    if panel.ylog:
        ax.set_yscale("log")
    for label, x in panel.marks.items():
        ax.axvline(x, color=INK, linestyle=(0, (2, 2)), linewidth=1.2)
        ax.annotate(f" {label}", (x, 1), xycoords=("data", "axes fraction"), va="top")
    if panel.xlimits:
        ax.set_xlim(*panel.xlimits)
    if panel.limits:
        ax.set_ylim(*panel.limits)
    ax.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
    ax.grid(True)
    if not panel.ylog:
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    if len(panel.curves) > 1:
        ax.legend()


def draw_note(ax: Axes, panel: Note):
    ax.axis("off")
    ax.text(0, 1, panel.text, va="top", family="DejaVu Sans Mono", fontsize=10, color=INK)


def draw_picture(ax: Axes, panel: Picture):
    ax.axis("off")
    if panel.png is None:
        ax.text(0.5, 0.5, "a diagram, shown where the notebook runs", ha="center", color=INK)
        return
    ax.imshow(matplotlib.image.imread(io.BytesIO(panel.png), format="png"))


DRAW = {
    Heat: draw_heat,
    Bars: draw_bars,
    Lines: draw_lines,
    Note: draw_note,
    Picture: draw_picture,
}
