"""The viewer of a diagram in JupyterLab and in exported HTML, both without a network."""

import nbformat
import pytest
from nbconvert import HTMLExporter

from course_lib.teaching.diagrams.export import LiveDiagrams
from tools.browser import browser_page, command, open_notebook, run_all
from tools.execute import execute

SETUP = """import torch; torch.set_num_threads(1)
from course_lib import Config, ModernDecoder, new_caches
from course_lib.teaching import diagrams
from course_lib.trace import trace
torch.manual_seed(0)
model, caches = ModernDecoder(Config(n_layers=2)), None
ids = torch.randint(1000, (1, 6)); seen = trace(model, ids); caches = new_caches(model)
prefill = trace(model, ids, caches); decode = trace(model, ids[:, -1:], caches, 6)"""
CALLS = {
    "architecture": "diagrams.architecture(model, seen)",
    "block": "diagrams.block(model, seen, 1)",
    "moe": "diagrams.moe(model, seen)",
    "generation": "diagrams.generation(model, prefill, decode)",
}


def notebook():
    cells = [nbformat.v4.new_code_cell(source) for source in (SETUP, *CALLS.values())]
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})


def view_box(diagram) -> list[float]:
    text = diagram.locator("svg").first.get_attribute("viewBox")
    return [float(number) for number in text.split()]


def zoom_at_pointer(page, diagram):
    """Ctrl + wheel: what is under the pointer stays there, and more is seen of it."""
    before, box = view_box(diagram), diagram.locator("svg").first.bounding_box()
    x, y = box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.4
    page.mouse.move(x, y)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    page.wait_for_timeout(150)
    after = view_box(diagram)
    assert after[2] < 0.8 * before[2]
    left, right = (after[0] - before[0]) / (before[2] - after[2]), 0.3
    assert left == pytest.approx(right, abs=0.03)
    page.mouse.down()
    page.mouse.move(x + 60, y + 30, steps=4)
    page.mouse.up()
    panned = view_box(diagram)
    assert panned[0] < after[0] and panned[1] < after[1] and panned[2] == after[2]
    page.mouse.dblclick(x, y)
    assert view_box(diagram) == before


def by_keys(page, diagram):
    diagram.focus()
    fitted = view_box(diagram)
    page.keyboard.press("+")
    page.keyboard.press("ArrowRight")
    assert view_box(diagram)[0] > fitted[0] and view_box(diagram)[2] < fitted[2]
    page.keyboard.press("0")
    assert view_box(diagram) == fitted
    for _ in range(5):  # past the four buttons to the first node
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert diagram.locator(".diagram-panel").is_visible()
    page.keyboard.press("Escape")
    assert not diagram.locator(".diagram-panel").is_visible()


def opened(diagram, node: str) -> str:
    diagram.locator(f'[data-node="{node}"]').click()
    return diagram.locator(".diagram-panel").inner_text()


def full_screen(page, diagram):
    diagram.locator('[data-key="f"]').click()
    page.wait_for_function("() => !!document.fullscreenElement")
    page.wait_for_timeout(300)
    assert diagram.bounding_box()["height"] == page.viewport_size["height"]
    page.keyboard.press("f")
    page.wait_for_function("() => !document.fullscreenElement")


def test_diagrams_are_live_in_jupyterlab(lab, shots):
    address, folder = lab
    nbformat.write(notebook(), folder / "diagrams.ipynb")
    with browser_page(1400, 900) as watched:
        page = watched.page
        open_notebook(page, address, "diagrams.ipynb")
        run_all(page)
        page.wait_for_function("() => document.querySelectorAll('.diagram svg').length === 4")
        for index, name in enumerate(CALLS):
            diagram = page.locator(".diagram").nth(index)
            diagram.evaluate("e => e.scrollIntoView({block: 'start'})")
            page.wait_for_timeout(200)
            page.screenshot(path=shots / f"diagrams-{name}-before.png")
            zoom_at_pointer(page, diagram)
            diagram.locator('[data-key="+"]').click()
            page.screenshot(path=shots / f"diagrams-{name}-zoomed.png")
            diagram.locator('[data-key="0"]').click()
        block = page.locator(".diagram").nth(1)
        told = opened(block, "W_q")
        assert "course_lib/model/attention.py:" in told and "self.W_q(x)" in told
        assert "(1, 8, 6, 32) B H T h" in told and "module 09" in told
        page.screenshot(path=shots / "diagrams-block-panel.png")
        by_keys(page, block)
        full_screen(page, block)
        scrolled = "() => document.querySelector('.jp-WindowedPanel-outer').scrollTop"
        top, fitted = page.evaluate(scrolled), view_box(block)
        page.mouse.wheel(0, 150)
        page.wait_for_timeout(200)
        assert page.evaluate(scrolled) != top and view_box(block) == fitted
        command(page, "apputils:change-theme", theme="JupyterLab Dark")
        page.wait_for_timeout(1000)
        page.screenshot(path=shots / "diagrams-dark.png")
        assert not watched.errors and not watched.outside


def test_diagrams_are_live_in_exported_html(tmp_path, shots):
    executed = notebook()
    execute(executed, tmp_path)
    html, _ = HTMLExporter(preprocessors=[LiveDiagrams]).from_notebook_node(executed)
    path = tmp_path / "diagrams.html"
    path.write_text(html, encoding="utf-8")
    with browser_page(1280, 900) as watched:
        page = watched.page
        page.goto(path.as_uri())
        assert page.locator(".diagram svg").count() == 4
        diagram = page.locator(".diagram").nth(2)
        diagram.evaluate("e => e.scrollIntoView({block: 'start'})")
        zoom_at_pointer(page, diagram)
        assert "top-2" in opened(diagram, "top")
        page.screenshot(path=shots / "diagrams-exported.png")
        # nbconvert's own template asks for MathJax and the like; the diagrams ask for nothing
        assert len(watched.errors) == len(watched.outside)
        assert all("cdnjs" in url or "unpkg" in url for url in watched.outside)
