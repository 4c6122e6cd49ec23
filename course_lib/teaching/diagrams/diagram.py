"""A drawn diagram: SVG, PNG, HTML, and what a notebook cell shows and stores."""

import base64
import io
import json
import zlib
from functools import cached_property
from pathlib import Path

from PIL import Image

from course_lib.teaching.theme import png_bundle, save_pictures
from course_lib.trace import Trace

from . import render
from .grid import Grid
from .shapes import Edge
from .telling import facts

STATIC = Path(__file__).parents[1] / "static"
SHARPNESS = 1.5  # pixels of the stored PNG for one on the page


class Diagram:
    """A diagram drawn from a model and its trace; the last line of a cell shows it.

    `svg` is text, `png(scale)` and `html()` make the other forms. In JupyterLab it is a live
    viewer, in a stored notebook a PNG and one line of text with its shapes. Module 16."""

    def __init__(self, grid: Grid, kind: str, name: str, summary: str, trace: Trace):
        self.grid, self.kind, self.name, self.summary = grid, kind, name, summary
        self.trace = trace

    def __repr__(self) -> str:
        return f"Diagram({self.name}: {len(self.steps)} nodes; {self.summary})"

    @property
    def steps(self) -> list:
        """The nodes that are boxes or sums."""
        return [node for node in self.grid.nodes if node.kind != "dot"]

    @property
    def alt(self) -> str:
        """The diagram in words."""
        names = ", then ".join(node.lines[0] for node in self.steps)
        return f"Data flow of {self.name}: {self.summary}. Steps: {names}."

    @cached_property
    def svg(self) -> str:
        """The picture as SVG with title and description, the same bytes for the same model."""
        return render.svg(self.grid, f"Data flow of {self.name}", self.alt)

    def png(self, scale: float = SHARPNESS) -> bytes:
        """The same picture as PNG; it carries the live form along, see `live_html`."""
        return render.png(self.grid, scale, packed(self.svg, self.panel))

    @cached_property
    def panel(self) -> str:
        """What each node tells in the side panel, as JSON."""
        told = {}
        for node in self.steps:
            if node.about is not None:
                into = shapes_of(e for e in self.grid.edges if node in e.targets)
                out = shapes_of(e for e in self.grid.edges if node is e.source)
                title = node.lines[1:] if node.kind == "add" else node.lines
                told[node.name] = facts(node.about, title, self.trace, into, out)
        return json.dumps(told, ensure_ascii=False, separators=(",", ":"))

    def html(self) -> str:
        """The live viewer as one piece of HTML that asks nothing of the network."""
        return viewer_html(self.svg, self.panel)

    def save(self, name: str, folder: Path | None = None) -> list[Path]:
        """Write figures/name.svg and figures/name.png; a second call changes no byte."""
        return save_pictures(name, {"svg": self.svg.encode(), "png": self.png()}, folder)

    def _repr_mimebundle_(self, include=None, exclude=None):
        from .widget import DiagramWidget

        width = self.grid.size[0]
        data, metadata = png_bundle(self.png(), width, self.alt, repr(self))
        view = DiagramWidget(svg=self.svg, panel=self.panel)._repr_mimebundle_()
        live, _ = view if isinstance(view, tuple) else (view, {})
        return {**(live or {}), **data}, metadata


def shapes_of(edges) -> list[str]:
    return [edge_words(edge) for edge in edges if edge.labels]


def edge_words(edge: Edge) -> str:
    return "; ".join(f"{x.word} {x.shape} {x.axes}".strip() for x in edge.labels)


def viewer_html(svg: str, panel: str) -> str:
    """The viewer with its script and style in one element, and the picture inside it."""
    script = (STATIC / "diagram.js").read_text(encoding="utf-8")
    style = (STATIC / "diagram.css").read_text(encoding="utf-8")
    told = panel.replace("</", "<\\/")  # a closing tag inside the data would end the script
    return (
        f'<div class="diagram-host"><style>{style}</style>{svg}'
        f"<script>(function () {{\n{script}\n"
        "const host = document.currentScript.parentElement;\n"
        f"mountDiagram(host, host.querySelector('svg').outerHTML, {told});\n"
        "})();</script></div>"
    )


def packed(svg: str, panel: str) -> str:
    return base64.b64encode(zlib.compress(json.dumps([svg, panel]).encode(), 9)).decode()


def live_html(png: bytes) -> str | None:
    """The live viewer that a stored PNG of a diagram carries; None for any other picture.

    Whoever exports a notebook can call it, so that the HTML is live without a kernel.
    Module 16."""
    with Image.open(io.BytesIO(png)) as picture:
        note = picture.info.get(render.CHUNK)
    if note is None:
        return None
    svg, panel = json.loads(zlib.decompress(base64.b64decode(note)))
    return viewer_html(svg, panel)
