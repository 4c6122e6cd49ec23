"""Notebooks show each exercise's own stub, and run to the end with every stub answered."""

from pathlib import Path

import nbformat
import pytest

from course_lib.teaching.exercises import EXERCISES, load
from course_lib.teaching.stubs import TAG, exercise_stub, fill_stubs
from tools.browser import find_chromium
from tools.execute import execute
from tools.percent import read_source

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
SOURCES = [
    path
    for path in sorted((NOTEBOOKS / "src").glob("*.py"))
    if TAG.search(path.read_text(encoding="utf-8"))
]


def exercise_cells(notebook) -> dict[str, object]:
    """Exercise name to cell, for every cell tagged exercise:<name>."""
    tags = ((tag, cell) for cell in notebook.cells for tag in cell.metadata.get("tags", []))
    return {tag.removeprefix("exercise:"): c for tag, c in tags if tag.startswith("exercise:")}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_cell_holds_the_stub_of_its_exercise(path):
    for name, cell in exercise_cells(read_source(path)).items():
        assert name in EXERCISES
        assert cell.source == exercise_stub(name), f"{path.name}, cell {cell.id}"
        assert load(name).module == path.stem.split("_")[0]


def answered(stored: Path, folder: Path):
    """The stored notebook with its outputs, each exercise answered from the library."""
    source, filled = NOTEBOOKS / "src" / f"{stored.stem}.py", folder / f"{stored.stem}.py"
    filled.write_text(fill_stubs(source.read_text(encoding="utf-8")), encoding="utf-8")
    sources = {cell.id: cell.source for cell in read_source(filled).cells}
    notebook = nbformat.read(stored, as_version=4)
    for cell in notebook.cells:
        cell.source = sources[cell.id]
    return notebook


def unanswered(executed) -> list[str]:
    """Exercises whose cell does not begin by saying that it passed."""
    cells, told = exercise_cells(executed), []
    assert cells
    for name, cell in cells.items():
        streams = (o["text"] for o in cell.outputs if o["output_type"] == "stream")
        printed = "".join(map("".join, streams))
        told += [] if printed.startswith(f"{name}: passed: ") else [f"{name}: {printed}"]
    return told


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_an_exercise_left_open_is_named(path):
    stored = nbformat.read(NOTEBOOKS / f"{path.stem}.ipynb", as_version=4)
    assert len(unanswered(stored)) == len(exercise_cells(stored))


@pytest.mark.skipif(
    find_chromium() is not None, reason="tests/browser/test_course.py runs it, in JupyterLab"
)
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_notebook_runs_with_every_stub_answered_from_the_library(path, tmp_path):
    notebook = answered(NOTEBOOKS / f"{path.stem}.ipynb", tmp_path)
    execute(notebook, NOTEBOOKS)
    assert not unanswered(notebook)
