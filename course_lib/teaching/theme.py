"""One colour for one role, and figures that are drawn the same everywhere."""

import base64
import io
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from PIL import Image  # by which matplotlib writes PNGs

from course_lib.model.checks import require

# Chosen so that each has a contrast of 3 on white and on #111111, and any two differ also for
# readers with deuteranopia or protanopia; tests/teaching/test_theme.py measures both.
ROLE = {
    "stream": "#808b97",
    "q": "#2973ab",
    "k": "#dd6c04",
    "v": "#3ba367",
    "scores": "#8764d9",
    "cache": "#946a35",
    "router": "#bb3586",
    "experts": "#3f8fd0",
    "shared": "#8c5a34",
    "norm": "#4b8f8c",
}

# Expert e is EXPERTS[e % 8] whatever the number of experts; its number always stands beside it.
EXPERTS = (
    "#3f8fd0",
    "#d97a00",
    "#399f6c",
    "#c2408f",
    "#8a5cc7",
    "#a98600",
    "#c2514b",
    "#4b8f8c",
)

INK = {"light": "#1f2328", "dark": "#e6e6e6"}
PAPER = {"light": "#ffffff", "dark": "#111111"}
MASKED = {"light": "#d9dce1", "dark": "#3a3d42"}  # the ground of a hatched cell
HATCH = {"light": "#9aa1ab", "dark": "#767c85"}
# Stops of equal distance; both renderers mix linearly in sRGB between them.
SEQUENTIAL_STOPS = {
    "light": ("#f7f5fb", "#d3c7ea", "#a28bd3", "#6c4bb0", "#2f1468"),
    "dark": ("#1a1822", "#41307a", "#7454bd", "#ae92e6", "#f5efff"),
}
DIVERGING_STOPS = {
    "light": ("#0b4f86", "#5b9fd0", "#f6f6f6", "#e8935a", "#a63c00"),
    "dark": ("#8cc8f5", "#2f78b0", "#1b1b1f", "#b85a1c", "#ffb37a"),
}
SEQUENTIAL = LinearSegmentedColormap.from_list("sequential", SEQUENTIAL_STOPS["light"])
DIVERGING = LinearSegmentedColormap.from_list("diverging", DIVERGING_STOPS["light"])

# Points on a figure 9.6 inches wide, which fills a slide of 13.3: 12 pt are reached there.
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 10.5,
    "axes.edgecolor": "#9aa1ab",
    "axes.labelcolor": INK["light"],
    "axes.titlecolor": INK["light"],
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "axes.axisbelow": True,
    "grid.color": "#e3e6ea",
    "grid.linewidth": 0.8,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "xtick.color": "#9aa1ab",
    "ytick.color": "#9aa1ab",
    "xtick.labelcolor": INK["light"],
    "ytick.labelcolor": INK["light"],
    "legend.fontsize": 10,
    "legend.frameon": False,
    "lines.linewidth": 2.0,
    "hatch.linewidth": 0.8,
    "hatch.color": HATCH["light"],
    "svg.hashsalt": "course_lib",
    "svg.fonttype": "path",
}
DPI = 100
SHARPNESS = 1.5  # pixels of a stored PNG for one pixel on the page
COLOURS = 256  # of a stored PNG: one byte a pixel, a third of the size, no channel off by over 10
FIGURES = Path(__file__).resolve().parents[2] / "figures"


def role_colour(role: str) -> str:
    """The colour of a role, or of one expert as "expert 3". Module 16."""
    word, _, number = role.partition(" ")
    if word == "expert" and number.isdigit():
        return EXPERTS[int(number) % len(EXPERTS)]
    require(role in ROLE, f"role={role!r} has no colour.", f"Choose from {tuple(ROLE)}.")
    return ROLE[role]


def figure(width: float = 9.6, height: float = 4.0, **subplots):
    """A Figure outside pyplot and its axes; width and height in inches (100 pixels each).

    `subplots` goes to Figure.subplots (nrows, ncols, sharex, ...). Module 16."""
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
        FigureCanvasAgg(fig)
        return fig, fig.subplots(**subplots)


def png_of(fig: Figure) -> bytes:
    """The figure as PNG of few colours, the same bytes for the same figure."""
    drawn, stored = io.BytesIO(), io.BytesIO()
    quick = {"compress_level": 0}  # it is read again at once
    with matplotlib.rc_context(STYLE):
        fig.savefig(drawn, format="png", dpi=DPI * SHARPNESS, pil_kwargs=quick)
    image = Image.open(drawn).convert("RGB")
    few = image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(stored, format="png")
    return stored.getvalue()


def svg_of(fig: Figure) -> bytes:
    """The figure as SVG, the same bytes for the same figure."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        fig.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def png_bundle(png: bytes, width: int, alt: str, summary: str) -> tuple[dict, dict]:
    """What a cell stores: the picture with its alt text, and one line that nbval compares."""
    data = {"image/png": base64.b64encode(png).decode(), "text/plain": summary}
    return data, {"image/png": {"alt": alt, "width": width}}


@dataclass(frozen=True)
class Shown:
    """A figure as a notebook stores it. Module 16."""

    fig: Figure
    alt: str
    summary: str

    def _repr_mimebundle_(self, include=None, exclude=None):
        width = round(self.fig.get_figwidth() * DPI)
        return png_bundle(png_of(self.fig), width, self.alt, self.summary)


def show(fig: Figure, alt: str, summary: str | None = None) -> Shown:
    """Make `fig` the output of a cell: a PNG, and `summary` as its text line.

    alt says the finding in a sentence; summary the numbers shown (default: alt). Module 16."""
    require(bool(alt.strip()), f"alt={alt!r} says nothing.", "Say the finding in a sentence.")
    return Shown(fig, alt, summary or alt)


def save(fig: Figure, name: str, folder: Path | None = None) -> list[Path]:
    """Write figures/name.svg and figures/name.png; a second call changes no byte. Module 16."""
    return save_pictures(name, {"svg": svg_of(fig), "png": png_of(fig)}, folder)


def save_pictures(name: str, pictures: dict[str, bytes], folder: Path | None) -> list[Path]:
    """Write name.suffix for each picture into `folder` (default figures/) where bytes differ."""
    folder = FIGURES if folder is None else Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for suffix, content in pictures.items():
        path = folder / f"{name}.{suffix}"
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
        paths.append(path)
    return paths
