"""The engine: from a control to a picture, with failures in place and nothing left behind."""

import asyncio
import base64
import random
import sys
import time

import ipywidgets
import numpy as np
import pytest
import torch
from ipywidgets.widgets.widget import _instances

from course_lib.teaching.explore import Choice, Explorable, Slider, Step, Text, Toggle
from course_lib.teaching.memory import Results, nbytes
from course_lib.teaching.panels import Bars, Heat
from course_lib.teaching.theme import figure
from tests.teaching import suite


class Counted:
    """A computation that says how often it ran, and fails where it is told to."""

    def __init__(self):
        self.calls, self.failure = 0, None

    def compute(self, n: int, seed: int) -> dict:
        self.calls += 1
        if self.failure is not None:
            raise self.failure
        if n == 9:
            raise ValueError("n=9 is too many. Choose 1 to 8.")
        return {"values": np.random.default_rng(seed).random((n, n))}


def view(data, n, row):
    values = data["values"]
    return [
        Heat(
            values, title=f"{n} rows", limits=(0, 1), pick={"y": "row"}, mark=(min(row, n - 1), 0)
        ),
        Bars(values[min(row, n - 1)], range(n), title=f"row {row}"),
    ]


def summary(data, n):
    return f"mean {data['values'].mean():.3f} of {n} x {n}"


def make(work: Counted | None = None, **changes) -> Explorable:
    declared = {
        "controls": {"n": Slider(3, 1, 9), "seed": Slider(0, 0, 99), "row": Slider(0, 0, 8)},
        "view_only": ("row",),
        "title": "Which row is largest?",
        "code": lambda n: f"make({n})",
        "invariants": lambda data: [("in 0..1", bool((data["values"] <= 1).all()))],
    }
    work = work or Counted()
    return Explorable("toy", work.compute, view, summary, **{**declared, **changes})


# -- controls and state ---------------------------------------------------------------------------


def test_a_control_moves_the_picture():
    work = Counted()
    toy = make(work)
    assert work.calls == 1, "creation computes once"
    toy.controls["n"].value = 5
    assert work.calls == 2
    assert toy.drawn()[0][0].values.shape == (5, 5)
    assert toy.summary == f"toy: mean {toy.data['values'].mean():.3f} of 5 x 5"


def test_view_only_controls_and_known_states_compute_nothing():
    work = Counted()
    toy = make(work)
    toy.set(row=2)
    assert toy.drawn()[0][1].title == "row 2"
    toy.set(n=4)
    toy.set(n=3)
    assert work.calls == 2


def test_set_moves_several_controls_at_once():
    work = Counted()
    toy = make(work)
    toy.set(n=4, seed=7)
    assert work.calls == 2
    assert toy.state == {"n": 4, "seed": 7, "row": 0}


@pytest.mark.parametrize("wrong", [{"m": 1}, {"n": 10}, {"n": 2.5}, {"n": "2"}, {"n": True}])
def test_set_refuses_what_there_is_not(wrong):
    toy = make()
    with pytest.raises(ValueError, match=r"is no control|cannot be set"):
        toy.set(**wrong)
    assert toy.state["n"] == 3


def test_reset_brings_all_controls_back():
    toy = make()
    toy.set(n=5, seed=3, row=1)
    toy.reset_button.click()
    assert toy.state == {"n": 3, "seed": 0, "row": 0}


def test_a_click_on_a_cell_sets_the_control_that_the_panel_names():
    toy = make()
    click = {"event": "pick", "panel": 0, "tile": 0, "y": 2, "x": 1}
    toy.canvas._handle_custom_msg(click, [])
    assert toy.state["row"] == 2
    assert toy.drawn()[0][0].mark == [2, 0]


def test_a_pick_leaves_a_disabled_control_alone():
    toy = make(disabled=lambda: {"row": "not now"})
    toy.canvas._handle_custom_msg({"event": "pick", "panel": 0, "y": 2, "x": 0}, [])
    assert toy.state["row"] == 0
    assert toy.controls["row"].disabled
    assert "not now" in toy.reasons.value


def test_controls_that_share_a_reason_share_its_sentence():
    toy = make(disabled=lambda: {"row": "not now", "seed": "never", "n": "not now"})
    assert toy.reasons.value == "row, n: not now · seed: never"


def test_each_control_makes_its_widget():
    kinds = {
        Slider(2, 1, 8): ipywidgets.IntSlider,
        Slider(0.5, 0.0, 1.0): ipywidgets.FloatSlider,
        Slider(64, 1, 512, log=True): ipywidgets.SelectionSlider,
        Slider(4, values=(2, 4, 8)): ipywidgets.SelectionSlider,
        Choice("a", ("a", "b")): ipywidgets.ToggleButtons,
        Choice("a", tuple("abcdef")): ipywidgets.Dropdown,
        Toggle(True): ipywidgets.Checkbox,
        Text("hello"): ipywidgets.Text,
    }
    for control, kind in kinds.items():
        widget = control.widget("x")
        assert type(widget) is kind and widget.value == control.default
        assert all(control.accepts(value) for value in control.extremes())
    assert not Text("hello").widget("x").continuous_update


def test_a_readout_fits_beside_its_slider():
    slider = Slider(10_000, values=(8, 0.5, 10_000, 2**20, 10**8)).widget("theta")
    assert [label for label, _ in slider.options] == ["8", "0.5", "10,000", "1,048,576", "100M"]
    assert slider.value == 10_000


def test_options_that_do_not_fit_in_a_line_become_a_menu():
    kinds = {("RTX 4090", "H100", "H200"): "ToggleButtons"}
    kinds |= {("bfloat16", "float16", "float32"): "Dropdown", tuple("abcde"): "Dropdown"}
    for options, kind in kinds.items():
        assert type(Choice(options[0], options).widget("x")).__name__ == kind, options


def test_log_sliders_hold_their_ends_and_default():
    assert Slider(6, 1, 20, log=True).options() == (1, 2, 3, 4, 6, 8, 12, 16, 20)
    tenths = Slider(0.25, 0.01, 10.0, log=True).options()
    assert tenths[0] == 0.01 and tenths[-1] == 10.0 and 0.25 in tenths


def test_a_step_keeps_an_entry_a_click_to_the_limit_and_starts_over():
    widget = Step("one token", limit=2).widget("next")
    for wanted in (1, 2, 2):
        widget.more.click()
        assert widget.value == ((),) * wanted
    assert widget.more.disabled and widget.more.description == "one token (2)"
    widget.over.click()
    assert widget.value == () and not widget.more.disabled


def with_steps() -> Explorable:
    heat, shared = Slider(1, 0, 9), Toggle()
    step = Step("draw", limit=3, records={"heat": heat, "shared": shared})
    return make(
        controls={"n": Slider(3, 1, 9), "seed": Slider(0, 0, 99), "row": Slider(0, 0, 8),
                  "heat": heat, "shared": shared, "clicks": step},
        view_only=("row", "heat", "shared", "clicks"),
    )  # fmt: skip


def test_a_click_keeps_what_the_recorded_controls_stood_at():
    toy = with_steps()
    button = toy.controls["clicks"]
    button.more.click()
    toy.set(heat=7, shared=True)
    button.more.click()
    toy.set(heat=2)
    assert toy.state["clicks"] == ((1, False), (7, True))
    toy.reset()
    assert toy.state["clicks"] == ()


def test_a_step_accepts_only_entries_of_what_it_records():
    toy = with_steps()
    step = toy.declared["clicks"]
    assert step.extremes() == ((), ((0, False),) * 3, ((9, True),) * 3)
    assert step.nearest(2) == ((1, False),) * 2
    rng = random.Random(0)
    samples = [step.sample(rng) for _ in range(50)]
    assert all(map(step.accepts, samples)) and {len(value) for value in samples} == {0, 1, 2, 3}
    for bad in (2, ((10, False),), ((1,),), ([1, False],), ((1, False),) * 4):
        with pytest.raises(ValueError, match=r"at most 3 clicks, each \(heat, shared\)"):
            toy.set(clicks=bad)
        assert not toy.errors


def test_the_suite_goes_through_the_text_and_each_click():
    toy = with_steps()
    toy.declared["said"] = Text("a")
    state = {"n": 4, "said": "b", "clicks": ((1, True), (2, False))}
    first = (1, True)
    assert list(suite.way(toy, state)) == [
        {"said": "b"}, {"clicks": ()}, {"clicks": (first,)}, {"clicks": state["clicks"]}, state
    ]  # fmt: skip


def test_labels_carry_units_and_help():
    widget = Slider(2, 1, 8, label="length", unit="tokens", help="how many").widget("T")
    assert widget.description == "length (tokens)" and widget.tooltip == "how many"


# -- declarations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"controls": {f"c{i}": Toggle() for i in range(8)}}, "8 controls"),
        ({"controls": {}}, "0 controls"),
        (
            {"controls": {"s": Step("draw", records={"heat": Toggle()})}, "view_only": ()},
            r"records=\['heat'\]",
        ),
        ({"view_only": ("column",)}, "view_only"),
        ({"view_only": ("row", "seed")}, "compute takes"),
        ({"controls": {"n": Slider(3, 1, 9)}, "view_only": ()}, "is no control"),
        ({"runs": "everything"}, "runs='everything'"),
    ],
)
def test_a_bad_declaration_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(**changes)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Slider(9, 1, 8),
        lambda: Slider(1, 8, 1),
        lambda: Slider(3, values=(1, 2)),
        lambda: Choice("c", ("a", "b")),
    ],
)
def test_a_default_that_cannot_be_chosen_is_refused(bad):
    with pytest.raises(ValueError):
        bad()


# -- failures in place ----------------------------------------------------------------------------


def test_a_refusal_is_shown_as_its_sentence_and_the_last_picture_stays():
    toy = make()
    before = toy.canvas.picture
    toy.controls["n"].value = 9
    assert toy.canvas.status == {"state": "refused", "text": "n=9 is too many. Choose 1 to 8."}
    assert toy.canvas.picture is before
    assert not toy.errors
    toy.controls["n"].value = 2
    assert toy.canvas.status["state"] == "ok" and toy.refusal is None
    assert toy.drawn()[0][0].values.shape == (2, 2)


@pytest.mark.parametrize("place", ["compute", "view", "summary", "alt", "code", "disabled", "pick"])
def test_an_exception_in_any_handler_is_text_in_place_and_kept_for_tests(place):
    def broken(*arguments, **state):
        raise KeyError("planted")

    work = Counted()
    if place == "compute":
        toy = make(work)
        work.failure = KeyError("planted")
    elif place == "pick":
        toy = make()
        toy.declared["row"] = None
        toy.canvas._handle_custom_msg({"event": "pick", "panel": 0, "y": 1, "x": 0}, [])
    else:
        toy = make()
        setattr(toy, f"_{place}", broken)
    if place != "pick":
        toy.controls["n"].value = 6
    assert len(toy.errors) == 1
    assert toy.canvas.status["state"] == "failed"
    assert toy.canvas.status["text"].startswith("internal error: ")
    assert toy.drawn()[0][0].values.shape == (3, 3), "the last good picture stays"


def test_a_first_state_that_fails_is_shown_too():
    work = Counted()
    work.failure = RuntimeError("planted")
    toy = make(work)
    data, _ = toy._repr_mimebundle_()
    assert data["text/plain"] == "toy: internal error: RuntimeError: planted"
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")


def test_too_much_memory_is_refused_before_it_is_allocated():
    work = Counted()
    toy = make(work, limit_bytes=lambda n: n * 2**28)
    toy.set(n=8)
    assert work.calls == 1
    assert toy.refusal.startswith("toy: this state needs 2.0 GiB, and 1 GiB is the limit")
    toy.set(n=4)
    assert toy.refusal is None and work.calls == 2


# -- nothing left behind --------------------------------------------------------------------------


def test_running_a_cell_three_times_leaves_one_handler():
    works = [Counted() for _ in range(3)]
    toys = [make(work) for work in works]
    toys[-1].controls["n"].value = 5
    assert [work.calls for work in works] == [1, 1, 2]


def test_close_lets_go_of_every_widget():
    before = len(_instances)
    toy = make()
    assert len(_instances) > before + len(toy.controls)
    toy.close()
    assert len(_instances) == before


def test_no_pyplot_no_output_widget(monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    toy = make()
    toy.png()
    assert "matplotlib.pyplot" not in sys.modules

    def kinds(widget):
        children = getattr(widget, "children", ())
        return {type(widget)} | {kind for child in children for kind in kinds(child)}

    assert ipywidgets.Output not in kinds(toy.widget)


def test_what_is_remembered_is_bounded_in_number_and_bytes():
    results = Results(most=3, most_bytes=1000)
    for key in range(10):
        results.get(key, lambda: np.zeros(10))
    assert list(results.held) == [7, 8, 9]
    results.get(7, lambda: pytest.fail("remembered"))
    results.get("large", lambda: {"a": [np.zeros(110)]})
    assert list(results.held) == [7, "large"] or list(results.held) == ["large"]
    assert results.total_bytes <= 1000
    results.get("larger", lambda: np.zeros(1000))
    assert list(results.held) == ["larger"], "the newest is always kept"


def test_bytes_are_counted_in_containers_tensors_and_objects():
    class Thing:
        def __init__(self):
            self.a = torch.zeros(4)

    assert nbytes({"x": [np.zeros(2), (Thing(),)], "n": 3}) == 16 + 16
    assert nbytes(torch.zeros(100)[:1]) == 400, "a view holds all of its storage"


# -- in a running kernel --------------------------------------------------------------------------


def test_changes_that_come_together_are_computed_once():
    work = Counted()

    async def drag():
        toy = make(work)
        for n in (4, 5, 6, 7, 8):
            toy.controls["n"].value = n
        assert work.calls == 1, "nothing is computed while changes come in"
        await asyncio.sleep(0.08)
        return toy

    toy = asyncio.run(drag())
    assert work.calls == 2
    assert toy.drawn()[0][0].values.shape == (8, 8)


def test_a_long_drag_is_followed_while_it_lasts():
    work = Counted()

    async def drag():
        toy = make(work)
        for seed in range(20):
            toy.controls["seed"].value = seed
            await asyncio.sleep(0.01)

    asyncio.run(drag())
    assert 3 <= work.calls <= 10


# -- what is stored -------------------------------------------------------------------------------


def test_the_stored_output_is_widget_picture_and_numbers():
    toy = make(alt=lambda data, n: f"The mean of {n} rows is near one half.")
    data, metadata = toy._repr_mimebundle_()
    assert set(data) == {
        "application/vnd.jupyter.widget-view+json",
        "image/png",
        "text/plain",
    }
    assert data["text/plain"].startswith("toy: mean 0.") and "\n" not in data["text/plain"]
    assert metadata == {"image/png": {"alt": "The mean of 3 rows is near one half.", "width": 960}}
    assert make()._repr_mimebundle_()[0]["image/png"] == data["image/png"]


# -- the suite itself must be able to fail --------------------------------------------------------


def test_the_suite_passes_a_sound_explorable():
    toy = make()
    suite.check_handlers(toy)
    tour = suite.check_states(toy)
    suite.check_time(toy, tour)
    suite.check_memory(toy, tour)


def planted_exception(toy):
    toy._view = lambda data, **state: view(data, state["n"], 99 // (state["seed"] - 99))


def planted_wrong_drawing(toy):
    viewed = toy.viewed
    toy.viewed = lambda: shifted(viewed())


def shifted(rows):
    """Other values at each call: what is drawn is not what is viewed a moment later."""
    values = rows[0][0].values + np.float32(1e-3 * random.random())
    return [[Heat(values, limits=(0, 1)), *rows[0][1:]], *rows[1:]]


def planted_broken_invariant(toy):
    toy._invariants = lambda data, **state: [("row is 0", state["row"] == 0)]


def planted_traceback_as_refusal(toy):
    toy._compute = lambda n, seed: np.zeros((2, 2)) @ np.zeros((3, 3))


def planted_mostly_refused(toy):
    compute = toy._compute

    def refuse(n, seed):
        if n > 3:
            raise ValueError(f"n={n} is too many. Choose 1 to 3.")
        return compute(n=n, seed=seed)

    toy._compute = refuse


@pytest.mark.parametrize(
    "plant",
    [
        planted_exception,
        planted_wrong_drawing,
        planted_broken_invariant,
        planted_traceback_as_refusal,
        planted_mostly_refused,
    ],
)
def test_the_suite_fails_a_planted_mistake(plant):
    toy = make()
    plant(toy)
    with pytest.raises(AssertionError):
        suite.check_states(toy)


def test_the_suite_fails_a_planted_exception_in_a_handler(monkeypatch):
    toy = make()
    monkeypatch.setattr(Slider, "nearest", lambda self, index: 1 // 0)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        suite.check_handlers(toy)
    assert "division" in toy.canvas.status["text"]


def reading(spent: float) -> Explorable:
    """Reads a text as if by SmolLM2; only a change of the other control takes `spent` seconds."""

    def compute(text: str, n: int) -> dict:
        if n != asked[0]:
            until = time.process_time() + spent
            while time.process_time() < until:
                pass
        asked[0] = n
        return {"values": np.full((n, n), 0.5)}

    asked = [3]
    return Explorable(
        "reading", compute, lambda data: [Heat(data["values"])], lambda data: "1 number",
        controls={"text": Text("The cat."), "n": Slider(3, 1, 9)}, runs="smollm2",
    )  # fmt: skip


def test_only_a_new_sentence_may_take_a_second(monkeypatch):
    for constant in ("RANDOM_STATES", "WARM_UP", "UPDATES"):
        monkeypatch.setattr(suite, constant, 5)
    monkeypatch.setitem(suite.MOST_MS, "smollm2", 20)
    slow = reading(spent=0.03)
    tour = suite.check_states(slow, lambda: reading(spent=0.03))
    assert tour.sentences and tour.new
    with pytest.raises(AssertionError, match="a new state: reading"):
        suite.check_time(slow, tour)
    slow.results.held.clear()
    tour = suite.check_states(slow, lambda: reading(spent=0))  # it was the machine
    suite.check_time(slow, tour)
    suite.check_time(slow, suite.Tour(new=[20.0], sentences=[900.0]))
    with pytest.raises(AssertionError, match="a new sentence: reading"):
        suite.check_time(slow, suite.Tour(sentences=[1100.0]))


def test_the_suite_fails_slow_and_leaking_explorables():
    toy = make()
    with pytest.raises(AssertionError, match="p95"):
        suite.check_time(toy, suite.Tour(new=[10.0] * 90 + [200.0] * 10))
    with pytest.raises(AssertionError, match="p95"):
        suite.check_time(toy, suite.Tour(new=[10.0], shown_again=[30.0] * 10))
    with pytest.raises(AssertionError, match="a new state"):  # though clicks are many
        suite.check_time(toy, suite.Tour(new=[200.0], clicks=[10.0] * 100))
    with pytest.raises(AssertionError, match="nothing was computed"):
        suite.check_time(toy, suite.Tour(shown_again=[1.0]))
    with pytest.raises(AssertionError, match="stay"):
        suite.check_memory(toy, suite.Tour(leaked=30 * 2**20))
    kept = figure()
    with pytest.raises(AssertionError, match="1 figures stay"):
        suite.check_memory(toy, suite.Tour())
    assert kept
