"""The canvas by itself in a real browser: pixels and readouts are the values that were sent."""

import base64
import itertools
import re

import numpy as np
import pytest

from course_lib.teaching import theme, wire
from course_lib.teaching.canvas import STATIC, palette
from course_lib.teaching.panels import Bars, Heat, Lines, Note, Picture, row_heights, rows_of
from tools.browser import browser_page

WIDTH, HEIGHT = 900, 420
# A stand-in for anywidget's model: traits, listeners, and what the page sends back.
START = """async ([esm, css, picture, palette, data]) => {
  document.head.append(Object.assign(document.createElement("style"), {textContent: css}));
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  const shifted = new Uint8Array(bytes.length + 3);  // as in a message: not where arrays may start
  shifted.set(bytes, 3);
  picture.data = new DataView(shifted.buffer, 3);
  const traits = {picture, palette, status: {state: "ok", text: ""}}, heard = {};
  window.sent = [];
  window.model = {
    get: (name) => traits[name], send: (message) => window.sent.push(message),
    on: (event, f) => (heard[event] ??= []).push(f), off: () => {},
    set: (name, value) => { traits[name] = value; heard["change:" + name].forEach((f) => f()); },
  };
  const blob = new Blob([esm], {type: "text/javascript"});
  const {default: widget} = await import(URL.createObjectURL(blob));
  window.close_widget = await widget.render({model: window.model, el: document.body});
  await new Promise((done) => setTimeout(done, 100));
}"""
PIXELS = """(i) => { const c = document.querySelectorAll("canvas")[i];
  const d = c.getContext("2d").getImageData(0, 0, c.width, c.height);
  return [c.width, c.height, btoa(Array.from(d.data, (v) => String.fromCharCode(v)).join(""))]; }"""


@pytest.fixture(scope="module", params=[1], ids=["scale 1"])
def watched(request):
    with browser_page(width=WIDTH, height=700, scale=request.param) as page:
        yield page


@pytest.fixture
def shown(watched):
    """Show rows of panels; returns the page. Afterwards: no error, no request to outside."""

    def show(view, dark: bool = False):
        rows = rows_of(view)
        message = wire.encode(rows)
        picture = {
            "rows": message["rows"],
            "heights": row_heights(rows, HEIGHT),
            "alt": "What was found.",
            "code": "Config(n_heads=8)",
        }
        body = f"<body style='margin:0' data-jp-theme-light={'false' if dark else 'true'}></body>"
        watched.page.set_viewport_size({"width": WIDTH, "height": 700})
        watched.page.goto("about:blank")
        watched.page.set_content(f"<!doctype html>{body}")
        esm, css = (
            (STATIC / f"canvas.{kind}").read_text(encoding="utf-8") for kind in ("js", "css")
        )
        data = base64.b64encode(message["data"]).decode()
        watched.page.evaluate(START, [esm, css, picture, palette(), data])
        return watched.page

    yield show
    errors, watched.errors = watched.errors, []
    assert not errors and not watched.outside


def pixels(page, index: int = 0) -> np.ndarray:
    width, height, raw = page.evaluate(PIXELS, index)
    return np.frombuffer(base64.b64decode(raw), np.uint8).reshape(height, width, 4)


def readout(page) -> str:
    return page.locator(".xp-readout").inner_text()


def colour(stops, share: float) -> np.ndarray:
    """The colour of a share of the range, mixed linearly between the stops."""
    known = np.array([[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops])
    at = share * (len(stops) - 1)
    return [np.interp(at, range(len(stops)), known[:, channel]) for channel in range(3)]


def visit(page, index: int, step: int = 9):
    """Move the pointer over a canvas; yields (x, y, readout) wherever there is one."""
    page.mouse.move(0, 0)
    page.wait_for_function("document.querySelector('.xp-readout').textContent === ''")
    box = page.locator("canvas").nth(index).bounding_box()
    for y, x in itertools.product(
        range(4, int(box["height"]), step), range(4, int(box["width"]), step)
    ):
        page.mouse.move(box["x"] + x, box["y"] + y)
        if words := readout(page):
            yield x, y, words


@pytest.mark.parametrize("light", ["light", "dark"])
def test_cells_have_the_colour_and_the_readout_of_their_value(shown, light):
    values = np.array([[0.0, 0.25, 0.5], [1.0, 0.125, 0.75]], np.float32)
    hidden = np.array([[0, 0, 1], [0, 0, 0]], bool)
    panel = Heat(values, xlabel="key", ylabel="query", hidden=hidden, limits=(0, 1), width=0.4)
    page = shown([panel, Note("")], dark=light == "dark")
    image, seen = pixels(page), {}
    for x, y, words in visit(page, 0, 28):
        row, column, value = re.fullmatch(r"query (\d) · key (\d): (.*)", words).groups()
        seen.setdefault((int(row), int(column), value), []).append(image[y, x, :3])
    assert {(r, c) for r, c, _ in seen} == set(np.ndindex(2, 3))
    for (row, column, told), found in seen.items():
        if hidden[row, column]:
            assert told == "masked"
            continue
        assert np.float32(told) == values[row, column]
        wanted = colour(theme.SEQUENTIAL_STOPS[light], values[row, column])
        assert np.abs(np.median(found, axis=0) - wanted).max() <= 3, (row, column)


def test_bars_are_as_high_as_their_values(shown):
    panel = Bars([4, 2, 1], "abc", roles=["expert 0", "expert 1", "expert 2"], show_values=False)
    image = pixels(shown([panel]))[..., :3].astype(int)
    counts = []
    for expert in range(3):
        wanted = colour([theme.EXPERTS[expert]] * 2, 0)
        counts.append((np.abs(image - wanted).max(-1) <= 2).sum())
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.03)
    assert counts[0] / counts[2] == pytest.approx(4, rel=0.03)


def test_bars_and_lines_say_their_values(shown):
    bars = Bars([[1, 2], [3, 4.5]], ["left", "right"], names=["met", "rest"], roles=["q", "k"])
    lines = Lines([1, 2, 4], {"a": [0.5, 0.25, 0.125], "b": [1, np.nan, 3]}, xlabel="m", xlog=True)
    page = shown([bars, lines])
    told = {words for _, _, words in visit(page, 0, 40)}
    assert told == {"left: met 1, rest 3, together 4", "right: met 2, rest 4.5, together 6.5"}
    told = {words for _, _, words in visit(page, 1, 40)}
    assert told == {"m 1: a 0.5 · b 1", "m 2: a 0.25 · b none", "m 4: a 0.125 · b 3"}


def test_what_is_missing_is_said_and_a_dense_curve_is_a_pale_band(shown):
    bars = Bars([np.nan, 5], ["left", "right"], missing="does not fit", roles=["k", "k"])
    swing = Lines(range(4000), {"a": np.cos(np.arange(4000))}, limits=(-1.05, 1.05), roles=["q"])
    page = shown([bars, swing])
    assert {words for _, _, words in visit(page, 0, 40)} == {"left: does not fit", "right: 5"}
    opaque = pixels(page, 1)[..., 3] / 255
    assert (np.abs(opaque - 0.25) < 0.01).mean() > 0.5 and (opaque > 0.5).mean() < 0.2


def test_nothing_is_cut_at_the_edge_of_a_panel(shown):
    lines = Lines([0, 1e5, 2e5], {"a": [0, 1, 2]}, width=0.5)
    full = Bars([1, 0.5], "ab", limits=(0, 1), fmt="{:.2f}", roles=["k", "k"], width=0.5)
    many = Bars(np.ones(300), list(map(str, range(300))), mark=299, show_values=False)
    page = shown([[lines, full], [many]])
    for index in range(3):
        ink = pixels(page, index)[..., 3] > 0
        strip = ink[-17:] if index != 1 else ink.T  # tick labels, or the number above a bar
        assert not strip[:, -1 if index != 1 else 0].any(), index


def test_a_row_names_each_tensor_and_a_tile_its_number(shown):
    names = [f"block {i}" for i in range(14)]
    low = Heat(np.eye(14, 40), yticks=names, square=False, title="low", height=1.4)
    tiles = Heat(np.zeros((16, 3, 3)), names=[f"h {i}" for i in range(16)], width=0.5)
    words = "() => window.written"
    spy = "const f = CanvasRenderingContext2D.prototype.fillText; window.written = [];"
    spy += "CanvasRenderingContext2D.prototype.fillText = function (t, ...at) {"
    spy += "window.written.push(t); return f.call(this, t, ...at); };"
    page = shown([[low], [tiles, Note("")]])
    page.evaluate(f"() => {{ {spy} }}")
    page.set_viewport_size({"width": 480, "height": 700})
    page.wait_for_function("() => window.written.includes('15')")
    assert {str(i) for i in range(16)} <= set(page.evaluate(words))
    assert set(names) <= set(page.evaluate(words))


def test_a_click_and_the_arrow_keys_pick(shown):
    heat = Heat(np.eye(3), pick={"x": "token"}, mark=(1, 1), square=False)
    page = shown([heat, Bars([1, 2, 3], "abc", pick={"x": "expert"})])
    canvas = page.locator("canvas")
    canvas.nth(0).focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert readout(page) == "row 2 · column 2: 1"
    picked = [(m["panel"], m["y"], m["x"]) for m in page.evaluate("window.sent")]
    assert picked == [(0, 1, 1), (0, 1, 2)], "the first press shows the mark; y is not picked"
    page.keyboard.press("Escape")
    assert readout(page) == ""
    box = canvas.nth(1).bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.9, box["y"] + box["height"] / 2)
    assert page.evaluate("window.sent.at(-1)") == {"event": "pick", "panel": 1, "x": 2}


def test_a_panel_without_pick_sends_nothing(shown):
    page = shown([Heat(np.eye(3))])
    page.locator("canvas").click()
    assert page.evaluate("window.sent") == []


def test_tiles_are_reached_by_keys(shown):
    page = shown([Heat(np.arange(8).reshape(2, 2, 2), names=["h 0", "h 1"], pick={"tile": "head"})])
    page.locator("canvas").focus()
    for key in ("ArrowUp", "PageDown", "ArrowRight"):
        page.keyboard.press(key)
    assert readout(page) == "h 1 · row 0 · column 1: 5"
    assert [m["tile"] for m in page.evaluate("window.sent")] == [1]


def test_it_says_what_it_shows_to_those_who_cannot_see_it(shown):
    page = shown([Heat(np.eye(2), title="Diagonal")])
    assert page.locator(".xp").get_attribute("aria-label") == "What was found."
    canvas = page.locator("canvas")
    assert canvas.get_attribute("aria-label") == "Diagonal. What was found."
    assert canvas.get_attribute("role") == "img" and canvas.get_attribute("tabindex") == "0"
    assert page.locator(".xp-readout").get_attribute("aria-live") == "polite"


@pytest.mark.parametrize("watched", [2], ids=["scale 2"], indirect=True)
def test_it_is_sharp_on_a_fine_screen_and_fits_a_narrow_one(shown):
    page = shown([Heat(np.eye(2)), Bars([1], "a"), Note("shapes")])
    canvas = page.locator("canvas").first
    sharp = page.evaluate("document.querySelector('canvas').width")
    assert sharp == 2 * canvas.bounding_box()["width"]
    before = canvas.bounding_box()["width"]
    page.set_viewport_size({"width": 420, "height": 700})
    page.wait_for_timeout(200)
    assert canvas.bounding_box()["width"] != before
    assert page.evaluate("document.documentElement.scrollWidth") <= 420


def test_a_failure_dims_the_picture_and_takes_the_place_of_the_finding(shown):
    page = shown([Heat(np.eye(2))])
    top = page.locator("canvas").bounding_box()["y"]
    page.evaluate("model.set('status', {state: 'refused', text: 'k=9 is too many. Choose 1.'})")
    page.wait_for_timeout(200)
    assert page.locator(".xp-status").inner_text() == "k=9 is too many. Choose 1."
    assert page.evaluate("getComputedStyle(document.querySelector('.xp-rows')).opacity") == "0.35"
    assert page.locator("canvas").bounding_box()["y"] == top
    page.evaluate("model.set('status', {state: 'ok', text: ''})")
    assert page.locator(".xp-status").inner_text() == ""


def test_focus_stays_while_the_picture_changes(shown):
    page = shown([Heat(np.eye(2))])
    page.locator("canvas").focus()
    page.evaluate("model.set('picture', model.get('picture'))")
    assert page.evaluate("document.activeElement.tagName") == "CANVAS"


def test_a_diagram_stands_in_the_page_without_its_scripts(shown):
    svg = (
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 10 10'>"
        "<script>window.bad = 1</script><circle r='4' cx='5' cy='5' fill='currentColor'/></svg>"
    )
    page = shown([Picture(svg)])
    assert page.locator("svg circle").count() == 1 and page.locator("svg script").count() == 0
    assert page.evaluate("window.bad") is None


def test_the_code_line_is_copied(shown):
    page = shown([Note("shapes")])
    page.locator(".xp-foot button").click()
    assert page.locator(".xp-foot code").inner_text() == "Config(n_heads=8)"
    page.wait_for_function("document.querySelector('.xp-foot button').textContent === 'copied'")
