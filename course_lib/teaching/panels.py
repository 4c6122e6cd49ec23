"""What a view shows, as plain data: heat maps, bars, lines, text, diagrams.

A panel draws nothing. `wire` packs panels for the browser's canvas, `static` draws them for the
stored PNG, and both start from the same values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

SCALES = ("sequential", "diverging")


def as_array(values, dtype=np.float64) -> np.ndarray:
    """Lists, numpy arrays and torch tensors as a contiguous numpy array."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    return np.ascontiguousarray(values, dtype=dtype)


def demand(ok: bool, problem: str):
    """A panel that does not fit together is an error of its view, not of the reader."""
    if not ok:
        raise TypeError(problem)


def as_texts(values: Sequence | None) -> list[str] | None:
    return None if values is None else [str(value) for value in values]


@dataclass(frozen=True, eq=False, kw_only=True)
class Panel:
    """What all panels share: a title that says the finding, and a place in the row.

    width is the share of the row's width, height the share of the picture's height that the
    row takes (the largest of its panels counts)."""

    title: str = ""
    width: float = 1.0
    height: float = 1.0


@dataclass(frozen=True, eq=False)
class Heat(Panel):
    """Cells (rows, columns), or tiles (n, rows, columns) side by side, coloured by value.

    Cells where `hidden` is True are hatched grey: masked, which is not zero. `pick` maps "x",
    "y" or "tile" to the control that a click sets; `mark` (row, column) is outlined.
    limits None: 0 to the largest value, or symmetric about 0 on a diverging scale. Module 16."""

    values: np.ndarray
    xlabel: str = ""
    ylabel: str = ""
    xticks: list[str] | None = None
    yticks: list[str] | None = None
    names: list[str] | None = None  # of the tiles
    limits: tuple[float, float] | None = None
    scale: str = "sequential"
    hidden: np.ndarray | None = None
    hidden_label: str = "masked"
    role: str = "scores"
    pick: Mapping[str, str] = field(default_factory=dict)
    mark: tuple[int, int] | None = None
    mark_tile: int | None = None
    square: bool | None = None  # square cells; None: where a tile is as high as wide
    fmt: str | None = None  # write the values into the cells where they fit

    def __post_init__(self):
        values = as_array(self.values, np.float32)
        demand(values.ndim in (2, 3), f"Heat values {values.shape}: give 2-D or 3-D.")
        demand(values.size > 0, f"Heat values {values.shape} are empty.")
        hidden = None if self.hidden is None else as_array(self.hidden, np.bool_)
        if hidden is not None:
            hidden = np.ascontiguousarray(np.broadcast_to(hidden, values.shape))
        shown = values if hidden is None else values[~hidden]
        demand(bool(np.isfinite(shown).all()), "Heat: a cell is not finite and not hidden.")
        demand(self.scale in SCALES, f"Heat scale {self.scale!r}: choose from {SCALES}.")
        for name, length in (("xticks", values.shape[-1]), ("yticks", values.shape[-2])):
            ticks = as_texts(getattr(self, name))
            demand(
                ticks is None or len(ticks) == length,
                f"Heat {name}: {len(ticks or [])} labels for {length} cells.",
            )
            object.__setattr__(self, name, ticks)
        if values.ndim == 3:
            names = as_texts(self.names) or [str(i) for i in range(len(values))]
            demand(len(names) == len(values), f"Heat: {len(names)} names, {len(values)} tiles.")
            object.__setattr__(self, "names", names)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "hidden", hidden)
        object.__setattr__(self, "limits", self.limits or own_limits(shown, self.scale))


def own_limits(shown: np.ndarray, scale: str) -> tuple[float, float]:
    largest = float(np.abs(shown).max()) if shown.size else 1.0
    largest = largest or 1.0
    return (-largest, largest) if scale == "diverging" else (0.0, largest)


@dataclass(frozen=True, eq=False)
class Bars(Panel):
    """One bar for each label; 2-D values (n names, n labels) are stacked.

    fmt is a format string, or "compact" for 1.5M. NaN is no bar: `missing` is written in its
    place. `reference` is a dashed line, with its
    label. roles: one for each bar, or for each name when stacked; "expert 3" is a role.
    pick={"x": control} sets it to the bar's index. Module 16."""

    values: np.ndarray
    labels: list[str]
    xlabel: str = ""
    ylabel: str = ""
    role: str = "stream"
    roles: list[str] | None = None
    names: list[str] | None = None
    reference: float | None = None
    reference_label: str = ""
    show_values: bool = True
    fmt: str = "{:.0f}"
    missing: str | None = None
    limits: tuple[float, float] | None = None
    pick: Mapping[str, str] = field(default_factory=dict)
    mark: int | None = None

    def __post_init__(self):
        values = as_array(self.values)
        demand(values.ndim in (1, 2), f"Bars values {values.shape}: give 1-D or 2-D.")
        demand(values.size > 0, "Bars: no values.")
        known = values if self.missing is None else values[~np.isnan(values)]
        demand(bool(np.isfinite(known).all()), "Bars: a value is not finite.")
        labels = as_texts(self.labels)
        demand(
            len(labels) == values.shape[-1],
            f"Bars: {len(labels)} labels for {values.shape[-1]} bars.",
        )
        names = as_texts(self.names)
        if values.ndim == 2:
            demand(
                names is not None and len(names) == len(values),
                f"Bars: stacked values need {len(values)} names, got {names}.",
            )
        wanted = len(values) if values.ndim == 2 else len(labels)
        roles = self.roles or [self.role] * wanted
        demand(len(roles) == wanted, f"Bars: {len(roles)} roles, {wanted} wanted.")
        for name, value in (
            ("values", values),
            ("labels", labels),
            ("names", names),
            ("roles", list(roles)),
        ):
            object.__setattr__(self, name, value)


@dataclass(frozen=True, eq=False)
class Lines(Panel):
    """Named curves over one x. `marks` are vertical lines {label: x}; NaN leaves a gap.
    Module 16."""

    x: np.ndarray
    curves: Mapping[str, np.ndarray]
    xlabel: str = ""
    ylabel: str = ""
    xlog: bool = False
    ylog: bool = False
    marks: Mapping[str, float] = field(default_factory=dict)
    roles: list[str] | None = None
    dots: bool = False
    xlimits: tuple[float, float] | None = None
    limits: tuple[float, float] | None = None

    def __post_init__(self):
        x = as_array(self.x)
        curves = {str(name): as_array(y) for name, y in self.curves.items()}
        demand(x.ndim == 1 and x.size > 0, f"Lines x {x.shape}: give a 1-D array.")
        demand(bool(curves), "Lines: no curve.")
        for name, y in curves.items():
            demand(y.shape == x.shape, f"Lines {name!r}: {y.shape} values over {x.shape}.")
        roles = list(self.roles or list(LINE_ROLES)[: len(curves)])
        demand(len(roles) >= len(curves), f"Lines: {len(roles)} roles, {len(curves)} curves.")
        object.__setattr__(self, "x", x)
        object.__setattr__(self, "curves", curves)
        object.__setattr__(self, "roles", roles)


LINE_ROLES = ("q", "k", "v", "scores", "cache", "router", "stream", "shared", "norm", "experts")


@dataclass(frozen=True, eq=False)
class Note(Panel):
    """Lines of text in a fixed-width font: shapes, numbers. Module 16."""

    text: str


@dataclass(frozen=True, eq=False)
class Picture(Panel):
    """A diagram as SVG (currentColor follows the theme); png makes what stands in for it where
    only a PNG is shown, and is called only there. Module 16."""

    svg: str
    png: Callable[[], bytes] | None = field(default=None, metadata={"sent": False})


def rows_of(view) -> list[list[Panel]]:
    """A view returns panels, which make one row, or rows of panels."""
    view = [view] if isinstance(view, Panel) else list(view)
    demand(bool(view), "The view shows no panel.")
    rows = [view] if isinstance(view[0], Panel) else [list(row) for row in view]
    panels = [panel for row in rows for panel in row]
    demand(all(isinstance(p, Panel) for p in panels), "The view holds something else than panels.")
    return rows


def compact(value: float) -> str:
    """1,500,000 as 1.5M: short enough for a tick."""
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9999:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


NOTE_LINE, NOTE_TITLE, NOTE_FRAME, LEAST_ROW = 18, 26, 14, 110  # pixels


def row_heights(rows: list[list[Panel]], total: int) -> list[int]:
    """Pixels of each row: text takes its lines, the other rows share what is left."""
    fixed = [note_height(row) if all(isinstance(p, Note) for p in row) else None for row in rows]
    shares = [max(panel.height for panel in row) for row in rows]
    weight = sum(s for s, f in zip(shares, fixed, strict=True) if f is None)
    left = total - sum(f for f in fixed if f is not None)
    return [
        f if f is not None else max(LEAST_ROW, round(left * s / weight))
        for s, f in zip(shares, fixed, strict=True)
    ]


def note_height(row: list[Note]) -> int:
    frame = NOTE_FRAME + NOTE_TITLE * any(note.title for note in row)
    return frame + NOTE_LINE * max(note.text.count("\n") + 1 for note in row)
