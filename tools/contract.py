"""Rules for stored notebooks that hold without running them; each returns full sentences."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from tools.normalise import dumps, normalise
from tools.percent import read_source

MAX_LINES = 25
MAX_COLUMNS = 100
MACHINE_PATH = re.compile(r"(?<![\w.])(?:/(?:home|root|Users|tmp|work)/|[A-Z]:\\Users\\)\S*")
FIGURE_REPR = re.compile(r"<Figure size .*>")


def source_of(path: Path) -> Path:
    """Return the percent file that notebooks/NAME.ipynb is built from."""
    return path.parent / "src" / f"{path.stem}.py"


def missing_twins(folder: Path) -> list[str]:
    """Name every notebook without a source and every source without a notebook."""
    built = {path.stem for path in folder.glob("*.ipynb")}
    sources = {path.stem for path in (folder / "src").glob("*.py")}
    return [
        *(
            f"{folder}/{name}.ipynb has no src/{name}.py. {adopt_hint(name)}"
            for name in sorted(built - sources)
        ),
        *(
            f"{folder}/src/{name}.py has no notebook. Run: make refresh NB={name}"
            for name in sorted(sources - built)
        ),
    ]


def adopt_hint(name: str) -> str:
    """Say how an edit made in JupyterLab gets into the source."""
    return f"To take an edit made in JupyterLab back, run: python -m tools.notebooks adopt {name}"


def problems(path: Path) -> list[str]:
    """Return what is wrong with one stored notebook, as far as it shows without running it."""
    try:
        text = path.read_text(encoding="utf-8")
        notebook = nbformat.reads(text, as_version=nbformat.NO_CONVERT)
        source = read_source(source_of(path))
    except (OSError, ValueError) as error:
        return [str(error)]
    found = [*differs_from_source(path.stem, notebook, source)]
    if text != dumps(normalise(notebook)):
        found.append(f"it is not in its stored form. Run: make refresh NB={path.stem}")
    for rule in CELL_RULES:
        for index, cell in enumerate(notebook.cells):
            following = notebook.cells[index + 1 : index + 2]
            found += [f"cell {cell.id}: {sentence}" for sentence in rule(cell, following)]
    return [f"{path}: {sentence}" for sentence in found]


def differs_from_source(name: str, notebook: NotebookNode, source: NotebookNode) -> Iterator[str]:
    """Compare cells in order and name the first one that differs."""
    stored, written = (
        [(cell.id, cell.cell_type, cell.source, cell.metadata) for cell in nb.cells]
        for nb in (normalise(notebook), source)
    )
    if stored == written:
        return
    pairs = zip(stored, written, strict=False)
    same = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(stored), len(written)))
    cell = (written + stored)[same][0] if same < len(written) else stored[same][0]
    yield (
        f"cell {cell} differs from src/{name}.py, and the .py wins: make refresh NB={name} writes "
        f"the notebook from it. {adopt_hint(name)}"
    )


Cells = list[NotebookNode]


def too_long(cell: NotebookNode, following: Cells) -> Iterator[str]:
    """Keep code on one screen."""
    lines = cell.source.splitlines() if cell.cell_type == "code" else []
    if len(lines) > MAX_LINES:
        yield f"{len(lines)} lines of code, and {MAX_LINES} are the most."
    for line in lines:
        if len(line) > MAX_COLUMNS:
            yield f"{len(line)} columns, and {MAX_COLUMNS} are the most: {line[:40]!r}..."


def not_executed(cell: NotebookNode, following: Cells) -> Iterator[str]:
    """Demand outputs of a run: nbval runs a cell that was never run, but compares nothing."""
    if cell.cell_type == "code" and cell.execution_count is None:
        yield "it was never executed, so its output is compared with nothing. Run: make refresh"


def stored_failure(cell: NotebookNode, following: Cells) -> Iterator[str]:
    """Refuse warnings, and errors that the author did not announce by a tag."""
    expected = "raises-exception" in cell.metadata.get("tags", [])
    for output in cell.get("outputs", []):
        if output.output_type == "error" and not expected:
            yield f"it ends in {output.ename}: {output.evalue}"
        if output.output_type == "stream" and output.name == "stderr":
            yield f"it writes to stderr: {output.text.strip()[:80]!r}"


def machine_path(cell: NotebookNode, following: Cells) -> Iterator[str]:
    """Refuse output that names a folder of the machine it ran on."""
    for text in texts(cell):
        for path in MACHINE_PATH.findall(text):
            yield f"its output names a path of this machine: {path}"


def silent_figure(cell: NotebookNode, following: Cells) -> Iterator[str]:
    """Demand words for every picture: alt text, its own text line, or prose right after it."""
    outputs = cell.get("outputs", [])
    for index, output in enumerate(outputs):
        pictures = [kind for kind in output.get("data", {}) if kind.startswith("image/")]
        if not pictures or any(output.metadata.get(kind, {}).get("alt") for kind in pictures):
            continue
        own_text = output.data.get("text/plain", "")
        says_something = own_text and not FIGURE_REPR.fullmatch(own_text)
        prose_next = following and following[0].cell_type == "markdown"
        if not (says_something or prose_next or outputs[index + 1 :]):
            yield "a figure has neither alt text nor text after it."


def texts(cell: NotebookNode) -> Iterator[str]:
    """Yield every text of a cell's outputs: streams, error values, text and SVG bundles."""
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            yield output.text
        elif output.output_type == "error":
            yield f"{output.ename}: {output.evalue}"
        else:
            for kind, value in sorted(output.data.items()):
                if kind.startswith("text/") or kind == "image/svg+xml":
                    yield value


CELL_RULES: tuple[Callable[[NotebookNode, Cells], Iterator[str]], ...] = (
    too_long,
    not_executed,
    stored_failure,
    machine_path,
    silent_figure,
)
