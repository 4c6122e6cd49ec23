"""Each notebook's slides as one HTML file that needs no network: reveal.js and MathJax inside.

python -m tools.slides [NB...]      writes build/slides/NB.html from the stored outputs
"""

import re
import sys
from pathlib import Path

import nbformat
from nbconvert import SlidesExporter
from nbformat import NotebookNode
from traitlets.config import Config

TOOLS = Path(__file__).resolve().parent
VENDOR = TOOLS / "vendor"
TEMPLATES = TOOLS / "templates"
NOTEBOOKS = Path("notebooks")
DECKS = Path("build/slides")
WIDTH, HEIGHT = 1280, 720
LINK = re.compile(r'<link rel="stylesheet" href="[^"]*"[^>]*>')


def inlined() -> dict[str, str | int]:
    """The texts that the template writes into the file."""
    files = {
        "reveal_js": VENDOR / "reveal.js",
        "notes_js": VENDOR / "notes.js",
        "reveal_css": VENDOR / "reveal.css",
        "mathjax_js": VENDOR / "mathjax-tex-svg-full.js",
        "deck_css": TEMPLATES / "deck" / "deck.css",
    }
    texts = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    # "</script>" inside a script would end it for the browser
    safe = {
        n: t.replace("</script", "<\\/script") if n.endswith("js") else t for n, t in texts.items()
    }
    return safe | {"width": WIDTH, "height": HEIGHT}


def exporter() -> SlidesExporter:
    settings = Config()
    settings.SlidesExporter.template_name = "deck"
    settings.SlidesExporter.extra_template_basedirs = [str(TEMPLATES)]
    # the parent's stylesheets are links to a network; ours stand in the file
    settings.SlidesExporter.filters = {"replace_links": lambda html: LINK.sub("", html)}
    return SlidesExporter(config=settings)


def shows_output_only(cell: NotebookNode) -> bool:
    """On a slide a picture stands without the code that draws it, and so does any output whose
    cell is tagged "output-only"."""
    kinds = {kind for output in cell.get("outputs", []) for kind in output.get("data", {})}
    return "image/png" in kinds or "output-only" in cell.metadata.get("tags", [])


def write_deck(notebook: Path, folder: Path = DECKS) -> Path:
    """Write one notebook's deck; raises ValueError if no cell is marked as a slide."""
    content = nbformat.read(notebook, as_version=4)
    types = [cell.metadata.get("slideshow", {}).get("slide_type") for cell in content.cells]
    if "slide" not in types:
        raise ValueError(
            f"{notebook}: no cell is a slide. Mark cells in the source: "
            '# %% [markdown] id="..." slideshow={"slide_type": "slide"}'
        )
    for cell in filter(shows_output_only, content.cells):
        cell.metadata.transient = NotebookNode(remove_source=True)
    resources = {"deck": inlined(), "metadata": {"name": notebook.stem}}
    html, _ = exporter().from_notebook_node(content, resources=resources)
    folder.mkdir(parents=True, exist_ok=True)
    deck = folder / f"{notebook.stem}.html"
    deck.write_text(html, encoding="utf-8")
    return deck


def main(names: list[str]) -> int:
    paths = [NOTEBOOKS / f"{Path(name).stem}.ipynb" for name in names] or sorted(
        NOTEBOOKS.glob("*.ipynb")
    )
    for path in paths:
        print(write_deck(path))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
