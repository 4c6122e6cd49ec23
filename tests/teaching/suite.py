"""What every explorable must do: each check takes one and asserts, so that a planted one can fail.

States come from its own declaration: all pairs of extremes of its controls, then random ones.
"""

import ctypes
import gc
import itertools
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
from matplotlib.figure import Figure

from benchmarks.course import milliseconds
from course_lib.teaching.explore import Explorable, Step, Text
from course_lib.teaching.wire import same

RANDOM_STATES, WARM_UP, UPDATES = 50, 40, 200
# milliseconds of the process's CPU clock, 95th percentile, by what a new state runs
MOST_MS = {"formulas": 75, "model": 100, "smollm2": 100}
MOST_MS_SENTENCE = 1000  # another text through SmolLM2, and only that
MOST_MS_VIEW = 20
MOST_MS_ONE = 2000
MOST_LEAKED = 20 * 2**20
SENTENCE = re.compile(r"\w.*\.", re.DOTALL)


def corner_states(explorable: Explorable):
    """Every pair of controls at each of their extremes, all others at their defaults."""
    defaults = {name: c.default for name, c in explorable.declared.items()}
    pairs = itertools.combinations(explorable.declared.items(), 2)
    if len(explorable.declared) == 1:
        pairs = [(next(iter(explorable.declared.items())),) * 2]
    for (first, a), (second, b) in pairs:
        for x, y in itertools.product(a.extremes(), b.extremes()):
            yield {**defaults, first: x, second: y}


def random_states(explorable: Explorable, number: int = RANDOM_STATES, seed: int = 0):
    rng = random.Random(seed)
    for _ in range(number):
        yield {name: c.sample(rng) for name, c in explorable.declared.items()}


def check_state(explorable: Explorable, state: dict):
    """The state is shown as computed, or refused by a sentence; nothing else."""
    explorable.set(**state)
    where = f"{explorable.name} at {state}"
    assert not explorable.errors, f"{where}: {explorable.errors[0]!r}"
    if explorable.refusal is not None:
        assert SENTENCE.fullmatch(explorable.refusal), f"{where}: no sentence: {explorable.refusal}"
        return
    drawn, viewed = explorable.drawn(), explorable.viewed()
    assert [len(row) for row in drawn] == [len(row) for row in viewed], where
    for got, wanted in zip(sum(drawn, []), sum(viewed, []), strict=True):
        assert same(got, wanted), f"{where}: {wanted.title!r} is not drawn as computed"
    broken = [name for name, holds in explorable.invariants() if not holds]
    assert not broken, f"{where}: {broken}"
    assert "\n" not in explorable.summary and explorable.alt.strip(), where


def way(explorable: Explorable, state: dict):
    """How a reader gets to `state`, one part of it after another: the text, each click, the
    rest."""
    declared = explorable.declared.items()
    texts = {name: state[name] for name, c in declared if isinstance(c, Text)}
    if texts:
        yield texts
    for name in (name for name, c in declared if isinstance(c, Step)):
        for clicks in range(len(state[name])):
            yield {name: state[name][:clicks]}
        yield {name: state[name]}
    yield state


@dataclass
class Tour:
    """What a visit to all states measured, in milliseconds by what had to be done."""

    new: list[float] = field(default_factory=list)
    clicks: list[float] = field(default_factory=list)
    sentences: list[float] = field(default_factory=list)
    shown_again: list[float] = field(default_factory=list)
    updates: int = 0
    leaked: int = 0  # bytes

    def measured(self, explorable: Explorable) -> list[tuple[str, list[float], int]]:
        """What was done, how long it took each time, and how long it may take."""
        kinds = [
            ("a new state", self.new, MOST_MS[explorable.runs]),
            ("a click", self.clicks, MOST_MS[explorable.runs]),
            ("a new sentence", self.sentences, MOST_MS_SENTENCE),
            ("shown differently", self.shown_again, MOST_MS_VIEW),
        ]
        return [kind for kind in kinds if kind[1]]

    def line(self, explorable: Explorable) -> str:
        told = [
            f"{what} {percentile(times, 0.95):.1f} ms (at most {most})"
            for what, times, most in self.measured(explorable)
        ]
        return f"{explorable.name:24} p95 of {', '.join(told)}"


def check_states(explorable: Explorable, make: Callable[[], Explorable] | None = None) -> Tour:
    """Visit all corners and 50 random states or more, 200 after a warm-up; check each.

    `make` gives a fresh one, on which a slow state is tried once more."""
    corners, tour, seen = [*corner_states(explorable)], Tour(), set()
    more = random_states(explorable, 10 * (WARM_UP + UPDATES), seed=1)
    drawn_lots = shown = 0
    before = None
    for count, state in enumerate(itertools.chain(corners, random_states(explorable), more)):
        if count >= len(corners) + RANDOM_STATES and tour.updates >= WARM_UP + UPDATES:
            break
        if before is None and tour.updates >= WARM_UP:
            before = resident()
        for part in way(explorable, state):
            visit(explorable, explorable.state | part, tour, seen, make)
        check_state(explorable, state)
        show_differently(explorable, state, tour)
        drawn_lots += count >= len(corners)
        shown += count >= len(corners) and explorable.refusal is None
    tour.leaked = resident() - before
    explorable.reset()
    assert explorable.refusal is None, explorable.refusal
    assert shown * 2 >= drawn_lots, f"only {shown} of {drawn_lots} random states are shown"
    return tour


def visit(explorable: Explorable, state: dict, tour: Tour, seen: set, make: Callable | None):
    """Go to a state and keep how long that took, where something had to be computed."""
    before = explorable.state
    if state == before:
        return
    inputs = tuple(value for name, value in state.items() if name not in explorable.view_only)
    spent = milliseconds(explorable, state)
    tour.updates += 1
    if inputs not in seen and len(seen) > 2:  # the first ones import and draw weights
        times, most = kind_of_step(explorable, before, state, tour)
        if spent > most and make:  # what else runs on the machine only ever adds
            spent = min(spent, milliseconds_afresh(make, before, state))
        times.append(spent)
    seen.add(inputs)


def kind_of_step(explorable: Explorable, before: dict, state: dict, tour: Tour):
    """Where its time belongs, and how long it may take.

    Clicks are many: beside them a slow change of a setting would be lost in a percentile."""
    moved = {type(explorable.declared[name]) for name in state if state[name] != before[name]}
    if Text in moved and explorable.runs == "smollm2":
        return tour.sentences, MOST_MS_SENTENCE
    return tour.clicks if moved == {Step} else tour.new, MOST_MS[explorable.runs]


def milliseconds_afresh(make: Callable[[], Explorable], before: dict, state: dict) -> float:
    """The same step by one that remembers nothing of it."""
    fresh = make()
    fresh.set(**before)
    spent = milliseconds(fresh, state)
    fresh.close()
    return spent


def show_differently(explorable: Explorable, state: dict, tour: Tour):
    if explorable.view_only and explorable.refusal is None:
        name = explorable.view_only[tour.updates % len(explorable.view_only)]
        value = explorable.declared[name].extremes()[tour.updates % 2]
        tour.shown_again.append(
            min(milliseconds(explorable, {name: value}), milliseconds(explorable, state))
        )


def check_time(explorable: Explorable, tour: Tour):
    """Bound the 95th percentiles, and any single state."""
    line, measured = tour.line(explorable), tour.measured(explorable)
    assert tour.new or tour.sentences, f"{explorable.name}: nothing was computed"
    for what, times, most in measured:
        assert percentile(times, 0.95) <= most, f"{what}: {line}"
        assert max(times) <= MOST_MS_ONE, f"{line}, the slowest {max(times):.0f} ms"


def check_memory(explorable: Explorable, tour: Tour):
    """200 updates keep no figure and less than 20 MB, and what is remembered is bounded."""
    assert tour.leaked < MOST_LEAKED, f"{explorable.name}: {tour.leaked / 2**20:.1f} MB stay"
    assert len(explorable.results.held) <= explorable.results.most
    assert figures() == 0, f"{explorable.name}: {figures()} figures stay"


def check_handlers(explorable: Explorable):
    """Move every control by its own trait, press every button, pick in every panel."""
    for name, control in explorable.declared.items():
        for value in (*control.extremes(), control.default):
            explorable.controls[name].value = value
            assert explorable.state[name] == value
            assert not explorable.errors, f"{name}={value!r}: {explorable.errors[0]!r}"
    for button in buttons(explorable.widget):
        button.click()
    explorable.reset_button.click()
    for message in picks(explorable):
        explorable.canvas._handle_custom_msg(message, [])
    assert not explorable.errors, repr(explorable.errors[0])
    explorable.reset()


def buttons(widget) -> list:
    inner = [button for child in getattr(widget, "children", ()) for button in buttons(child)]
    return [widget, *inner] if hasattr(widget, "click") else inner


def picks(explorable: Explorable) -> list[dict]:
    """A click on the first and on the last cell of each panel that can be picked."""
    messages = []
    for index, panel in enumerate(sum(explorable.viewed(), [])):
        if not getattr(panel, "pick", None):
            continue
        shape = (1, 1, *panel.values.shape)[-3:]
        for tile, y, x in ((0, 0, 0), tuple(size - 1 for size in shape)):
            messages.append({"event": "pick", "panel": index, "tile": tile, "y": y, "x": x})
    return messages


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def resident() -> int:
    """Bytes in use: what the allocator keeps at hand for the next tensors does not count."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def figures() -> int:
    gc.collect()
    return sum(type(item) is Figure for item in gc.get_objects())
