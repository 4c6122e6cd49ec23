"""What every explorable must do: each check takes one and asserts, so that a planted one can fail.

States come from its own declaration: all pairs of extremes of its controls, then random ones.
"""

import ctypes
import gc
import itertools
import json
import random
import re
import sys
import time
from dataclasses import dataclass, field

import psutil
from matplotlib.figure import Figure

from course_lib.teaching.explore import Explorable
from course_lib.teaching.wire import same

RANDOM_STATES, WARM_UP, UPDATES = 50, 40, 200
# milliseconds of the process's CPU clock, 95th percentile, by what a new state runs
MOST_MS = {"formulas": 75, "model": 100, "smollm2": 1000}
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


@dataclass
class Tour:
    """What a visit to all states measured: milliseconds of new states, of others, of views."""

    new: list[float] = field(default_factory=list)
    shown_again: list[float] = field(default_factory=list)
    shown: int = 0  # random states that were not refused
    leaked: int = 0  # bytes

    def line(self, explorable: Explorable) -> str:
        again = ""
        if self.shown_again:
            p95 = percentile(self.shown_again, 0.95)
            again = f", shown differently {p95:5.1f} ms (at most {MOST_MS_VIEW})"
        p95, most = percentile(self.new, 0.95), MOST_MS[explorable.runs]
        return f"{explorable.name:24} p95 of a new state {p95:6.1f} ms (at most {most}){again}"


def check_states(explorable: Explorable) -> Tour:
    """Visit all corners and 50 random states or more, 200 after a warm-up; check each."""
    states = [*corner_states(explorable), *random_states(explorable)]
    more = max(0, WARM_UP + UPDATES - len(states))
    tour, seen = Tour(), set()
    before = None
    for count, state in enumerate((*states, *random_states(explorable, more, seed=1))):
        if count == WARM_UP:
            before = resident()
        visit(explorable, state, tour, seen)
        tour.shown += count >= len(states) - RANDOM_STATES and explorable.refusal is None
    tour.leaked = resident() - before
    explorable.reset()
    assert explorable.refusal is None, explorable.refusal
    assert tour.shown * 2 >= RANDOM_STATES + more, f"only {tour.shown} random states are shown"
    return tour


def visit(explorable: Explorable, state: dict, tour: Tour, seen: set):
    inputs = tuple(value for name, value in state.items() if name not in explorable.view_only)
    spent = milliseconds(explorable, state)
    if inputs not in seen and len(seen) > 2:  # the first ones import and draw weights
        if spent > MOST_MS[explorable.runs]:  # what else runs on the machine only ever adds
            explorable.results.held.clear()
            spent = min(spent, milliseconds(explorable, state))
        tour.new.append(spent)
    seen.add(inputs)
    check_state(explorable, state)
    if explorable.view_only and explorable.refusal is None:
        name = explorable.view_only[len(seen) % len(explorable.view_only)]
        value = explorable.declared[name].extremes()[len(seen) % 2]
        tour.shown_again.append(
            min(milliseconds(explorable, {name: value}), milliseconds(explorable, state))
        )


def check_time(explorable: Explorable, tour: Tour):
    """Bound the 95th percentiles, and any single state."""
    line = tour.line(explorable)
    assert percentile(tour.new, 0.95) <= MOST_MS[explorable.runs], line
    assert max(tour.new) <= MOST_MS_ONE, f"{line}, the slowest {max(tour.new):.0f} ms"
    assert not tour.shown_again or percentile(tour.shown_again, 0.95) <= MOST_MS_VIEW, line


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


def milliseconds(explorable: Explorable, state: dict) -> float:
    """CPU time from the change of state to a message ready to be sent."""
    begin = time.process_time()
    explorable.set(**state)
    json.dumps(explorable.canvas.picture.get("rows"))
    return 1000 * (time.process_time() - begin)


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
