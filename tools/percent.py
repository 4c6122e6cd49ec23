"""Read and write notebooks/src/*.py: notebooks as py:percent text, each cell with its own id."""

import re
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

from tools.normalise import CELL_KEYS, cell_metadata, normalise

PERCENT = {
    "extension": ".py",
    "format_name": "percent",
    "cell_metadata_filter": "all",
    "notebook_metadata_filter": "-all",
}
ID_RULE = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
# What nbformat and JupyterLab draw: eight hex digits or a UUID.
RANDOM_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){0,3}(-[0-9a-f]{12})?")


def read_source(path: Path) -> NotebookNode:
    """Read a percent file into a notebook without outputs; refuse a cell without its own id."""
    text = path.read_text(encoding="utf-8")
    notebook = jupytext.reads(text, fmt=PERCENT)
    lines = [n for n, line in enumerate(text.splitlines(), 1) if line.startswith("# %%")]
    if len(lines) != len(notebook.cells):
        raise ValueError(
            f"{path}: {len(notebook.cells)} cells under {len(lines)} '# %%' lines. "
            'Every cell starts with one, such as # %% id="rope-rotate", the first included.'
        )
    seen: dict[str, int] = {}
    for line, cell in zip(lines, notebook.cells, strict=True):
        _take_id(cell, f"{path}:{line}", seen)
        seen[cell.id] = line
    return normalise(notebook)


def write_source(notebook: NotebookNode, path: Path) -> None:
    """Write the notebook's cells, ids and metadata as a percent file."""
    cells = []
    for cell in notebook.cells:
        metadata = {"id": cell.id, **cell_metadata(cell.metadata)}
        make = nbformat.v4.new_code_cell
        if cell.cell_type == "markdown":
            make = nbformat.v4.new_markdown_cell
        cells.append(make(cell.source.rstrip(), metadata=metadata))
    path.write_text(
        jupytext.writes(nbformat.v4.new_notebook(cells=cells), fmt=PERCENT), encoding="utf-8"
    )


def _take_id(cell: NotebookNode, place: str, seen: dict[str, int]) -> None:
    cell.metadata.pop("lines_to_next_cell", None)  # ruff wants two blank lines before a def
    name = cell.metadata.pop("id", None)
    if name is None:
        raise ValueError(f'{place}: the cell has no id. Name it in its header: # %% id="...".')
    if RANDOM_ID.fullmatch(name):
        raise ValueError(
            f"{place}: id={name!r} is a random one. Name the cell after what it shows."
        )
    if not ID_RULE.fullmatch(name) or len(name) > 64:
        raise ValueError(
            f"{place}: id={name!r} is not lower-case words joined by hyphens, up to 64 characters."
        )
    if name in seen:
        raise ValueError(f"{place}: id={name!r} is taken by the cell of line {seen[name]}.")
    unknown = sorted(set(cell.metadata) - set(CELL_KEYS))
    if unknown:
        raise ValueError(
            f"{place}: {unknown[0]!r} is not cell metadata known here. "
            f"Choose from id, {', '.join(CELL_KEYS)}."
        )
    cell.id = name
