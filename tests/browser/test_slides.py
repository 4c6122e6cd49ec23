"""Every deck opens without a network, no slide overflows and every formula is set."""

import re
from pathlib import Path

import nbformat
import pytest

from tools.browser import browser_page
from tools.slides import HEIGHT, WIDTH, write_deck

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
READY = "() => window.Reveal?.isReady()"
SIZES = """() => Reveal.getSlides().map(slide => {
  const { h, v } = Reveal.getIndices(slide);
  Reveal.slide(h, v, 999);
  const text = slide.innerText.trim().split('\\n')[0];
  const at = `${h + 1}.${(v || 0) + 1}`;
  return { at, text, height: slide.scrollHeight, width: slide.scrollWidth };
})"""
UNSET = """() => [...document.querySelectorAll('.slides')].map(e => {
  const copy = e.cloneNode(true);
  copy.querySelectorAll('code, pre, script, mjx-container, .highlight').forEach(n => n.remove());
  return (copy.textContent.match(/\\$[^$\\n]+\\$/g) || []).join(' ');
}).join(' ').trim()"""


def problems(page) -> list[str]:
    """What a reader in the last row would miss: cut slides, formulas as source."""
    found = [
        f"slide {s['at']} ({s['text']!r}) is {s['width']} x {s['height']}, {WIDTH} x {HEIGHT} fit"
        for s in page.evaluate(SIZES)
        if s["height"] > HEIGHT or s["width"] > WIDTH
    ]
    unset = page.evaluate(UNSET)
    errors = page.locator("mjx-merror").count()
    return found + ([f"not set: {unset}"] if unset else []) + ["a formula fails"] * errors


def open_deck(watched, notebook: Path, folder: Path):
    watched.page.goto(write_deck(notebook, folder).as_uri())
    watched.page.wait_for_function(READY, timeout=60_000)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_deck_is_whole(notebook, tmp_path, shots):
    with browser_page(WIDTH, HEIGHT) as watched:
        open_deck(watched, notebook, tmp_path)
        assert not problems(watched.page)
        count = watched.page.evaluate("() => Reveal.getTotalSlides()")
        assert 10 <= count <= 20, f"{count} slides: a deck has 10 to 20"
        assert watched.page.locator("aside.notes").count() > 0, "no speaker notes"
        for number in {0, count // 2, count - 1}:
            watched.page.evaluate("n => Reveal.slide(...[n, 0])", number)
            watched.page.screenshot(path=shots / f"slide-{notebook.stem}-{number + 1}.png")
        assert not watched.outside and not watched.errors
        deck = (tmp_path / f"{notebook.stem}.html").read_text(encoding="utf-8")
        assert not re.search(r'<(?:script|link)[^>]+(?:src|href)="', deck)


def test_a_tall_slide_and_a_broken_formula_are_found(tmp_path):
    slide = {"slideshow": {"slide_type": "slide"}}
    texts = ["# Whole\n\n$x^2$", "tall\n\n" * 60, "$\\frac{1$"]
    cells = [nbformat.v4.new_markdown_cell(text, metadata=slide) for text in texts]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "bad.ipynb")
    with browser_page(WIDTH, HEIGHT) as watched:
        open_deck(watched, tmp_path / "bad.ipynb", tmp_path)
        found = problems(watched.page)
    assert len(found) == 2 and "slide 2.1" in found[0], found


def test_a_notebook_without_slides_is_refused(tmp_path):
    nbformat.write(nbformat.v4.new_notebook(), tmp_path / "none.ipynb")
    with pytest.raises(ValueError, match="no cell is a slide"):
        write_deck(tmp_path / "none.ipynb", tmp_path)
