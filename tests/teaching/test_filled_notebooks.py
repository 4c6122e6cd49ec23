"""Notebooks show each exercise's own stub, and run to the end with every stub answered."""

from pathlib import Path

import pytest

from course_lib.teaching.exercises import EXERCISES, load
from course_lib.teaching.stubs import TAG, exercise_stub, fill_stubs
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


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_notebook_runs_with_every_stub_answered_from_the_library(path, tmp_path):
    filled = tmp_path / path.name
    filled.write_text(fill_stubs(path.read_text(encoding="utf-8")), encoding="utf-8")
    notebook = read_source(filled)
    execute(notebook, NOTEBOOKS)
    cells = exercise_cells(notebook)
    assert cells
    for name, cell in cells.items():
        printed = "".join(o.text for o in cell.outputs if o.output_type == "stream")
        assert printed.startswith(f"{name}: passed: "), printed
