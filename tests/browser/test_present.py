"""`make present`: everything runs, code and speaker notes are hidden, widgets are live."""

import nbformat
import pytest

from tools import present
from tools.browser import POLL, browser_page, lab_server

PRESENTED = "() => document.body.dataset.coursePresent === 'ready'"


def small_notebook():
    """A slider whose move a cell's output follows, and a note that nobody may see."""
    notes = {"slideshow": {"slide_type": "notes"}}
    code = "import ipywidgets\nw = ipywidgets.IntSlider()\nw.observe(lambda c: None)\nw"
    cells = [
        nbformat.v4.new_markdown_cell("# Seen by all"),
        nbformat.v4.new_markdown_cell("Whisper this", metadata=notes),
        nbformat.v4.new_code_cell(code),
    ]
    return nbformat.v4.new_notebook(
        cells=cells,
        metadata={
            "kernelspec": {
                "name": "python3",
                "display_name": "Python 3 (ipykernel)",
                "language": "python",
            }
        },
    )


def test_presentation_hides_code_and_keeps_widgets_live(tmp_path, shots):
    nbformat.write(small_notebook(), tmp_path / "talk.ipynb")
    extension = f"--LabApp.extra_labextensions_path={present.EXTENSIONS}"
    with lab_server(tmp_path, extension) as address, browser_page() as watched:
        page = watched.page
        page.goto(f"{address}/lab/tree/talk.ipynb?token=t&reset")
        page.wait_for_function(PRESENTED, timeout=90_000, polling=POLL)
        handle = page.locator(".widget-slider .noUi-handle")
        handle.focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_function(
            "() => document.querySelector('.widget-readout').textContent === '1'"
        )
        page.screenshot(path=shots / "present.png")
        assert page.locator(".jp-RenderedMarkdown h1").is_visible()
        assert page.locator(".course-notes").count() == 1
        assert not page.locator(".course-notes").is_visible()
        assert page.locator(".jp-CodeCell .cm-content:visible").count() == 0
        assert not watched.errors and not watched.outside


def test_a_notebook_that_is_not_there_is_named(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "05_rope.ipynb").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no notebooks/99_none.ipynb. Choose NB from: 05_rope"):
        present.options("99_none")
    assert any("05_rope.ipynb" in option for option in present.options("05_rope"))
