"""Explorables: a pure computation, a pure view of it, and controls; nothing else to write.

    Explorable("router", compute, view, summary, controls=dict(k=Slider(2, 1, 8), ...))

compute(k, ...) -> data     refuses a bad state by ValueError, which is shown as a sentence
view(data, k, ...)          -> panels (one row) or rows of panels; draws nothing itself
summary(data, k, ...)       -> one line with the numbers shown; a stored notebook keeps it

Each function names the controls that it uses. Here they are turned into widgets: changes are
gathered, results remembered by state, failures shown in place.
"""

import asyncio
import html
import inspect
from collections import deque
from collections.abc import Callable, Mapping

import ipywidgets

from course_lib.model.checks import require
from course_lib.teaching import agg, theme, wire
from course_lib.teaching.canvas import Canvas
from course_lib.teaching.controls import Choice, Control, Slider, Step, Text, Toggle
from course_lib.teaching.memory import MOST_RESULTS, Results
from course_lib.teaching.panels import Panel, row_heights, rows_of

__all__ = ["Choice", "Explorable", "Slider", "Step", "Text", "Toggle"]

MOST_CONTROLS = 7
MOST_ALLOCATED = 2**30  # bytes that one state may need
GATHER_SECONDS = 0.03  # changes that arrive together are computed once
REMEMBERED_ERRORS = 16
RUNS = ("formulas", "model", "smollm2")  # what a computation runs; the tests bound its time
PICTURE_WIDTH = 960  # pixels of the stored picture on the page


def with_class(widget: ipywidgets.Widget, name: str) -> ipywidgets.Widget:
    """The widget, marked so that static/canvas.css finds it."""
    widget.add_class(name)
    return widget


def parts_of(widget: ipywidgets.Widget) -> list[ipywidgets.Widget]:
    """The widget, all that it contains, and what they are laid out and styled by."""
    inner = [part for child in getattr(widget, "children", ()) for part in parts_of(child)]
    looks = [getattr(widget, name, None) for name in ("layout", "style")]
    return [widget, *inner, *(look for look in looks if isinstance(look, ipywidgets.Widget))]


def named(function: Callable | None, controls: Mapping, first: int) -> Callable | None:
    """`function` called with its first arguments and those controls that it names."""
    if function is None:
        return None
    parameters = list(inspect.signature(function).parameters.values())[first:]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    wanted = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    missing = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    unknown = [name for name in missing if name not in controls]
    require(
        not unknown,
        f"{getattr(function, '__name__', function)}: {unknown} is no control.",
        f"The controls are {tuple(controls)}.",
    )

    def call(*arguments, **state):
        used = state if takes_all else {n: v for n, v in state.items() if n in wanted}
        return function(*arguments, **used)

    return call


class Explorable:
    """Controls, and the picture of what they compute. Display it as the last line of a cell.

    title names the question, alt(data, ...) says the finding in a sentence, code(...) is the
    state as one line that runs. view_only names the controls that compute does not take.
    disabled(...) returns {control: reason}; limit_bytes(...) estimates what a state allocates;
    invariants(data, ...) returns [(name, holds)] for the tests. runs says what a new state
    costs: "formulas", a forward pass of a small "model", or one of "smollm2"; results of at most
    `remembered` states are kept. Raises ValueError for a bad declaration. Module 16."""

    def __init__(
        self,
        name: str,
        compute: Callable,
        view: Callable,
        summary: Callable,
        *,
        controls: Mapping[str, Control],
        title: str = "",
        alt: Callable | None = None,
        code: Callable | None = None,
        view_only: tuple[str, ...] = (),
        disabled: Callable | None = None,
        limit_bytes: Callable | None = None,
        invariants: Callable | None = None,
        runs: str = "formulas",
        remembered: int = MOST_RESULTS,
        height: int = 380,
    ):
        check_declaration(name, compute, controls, view_only, runs)
        self.name, self.title, self.height, self.runs = name, title or name, height, runs
        self.declared, self.view_only = dict(controls), tuple(view_only)
        inputs = [control for control in controls if control not in view_only]
        self._inputs = inputs
        self._compute = named(compute, {n: controls[n] for n in inputs}, first=0)
        self._view = named(view, controls, first=1)
        self._summary = named(summary, controls, first=1)
        self._alt = named(alt, controls, first=1) or self._summary
        self._code = named(code, controls, first=0)
        self._disabled = named(disabled, controls, first=0)
        self._limit_bytes = named(limit_bytes, controls, first=0)
        self._invariants = named(invariants, controls, first=1)
        self.results = Results(remembered)
        self.errors: deque[Exception] = deque(maxlen=REMEMBERED_ERRORS)
        self.refusal: str | None = None
        self._rows: list[list[Panel]] = []
        self._line = ""
        self._timer: asyncio.TimerHandle | None = None
        self._setting = False
        self._build_widgets()
        self.update()

    # -- widgets ------------------------------------------------------------------------------

    def _build_widgets(self):
        self.controls = {name: c.widget(name) for name, c in self.declared.items()}
        for name, control in self.declared.items():
            control.connect(self.controls[name], self.controls)
        self.canvas = Canvas()
        self.reset_button = ipywidgets.Button(
            description="reset", tooltip="all controls as at first", layout={"width": "80px"}
        )
        self.reasons = ipywidgets.HTML()
        for widget in self.controls.values():
            widget.observe(self._changed, "value")
        self.reset_button.on_click(lambda button: self._guarded(self.reset))
        self.canvas.on_msg(lambda widget, content, buffers: self._guarded(self._answer, content))
        heading = ipywidgets.HTML(f"<h3>{html.escape(self.title)}</h3>")
        title = with_class(heading, "explorable-title")
        top = with_class(ipywidgets.HBox([title, self.reset_button]), "explorable-top")
        parts = [top, *self._groups(), with_class(self.reasons, "explorable-reasons"), self.canvas]
        self.widget = with_class(ipywidgets.VBox(parts), "explorable")

    def _groups(self) -> list[ipywidgets.Widget]:
        """The controls in columns; groups stand side by side, each under its name."""
        groups: dict[str, list] = {}
        for name, control in self.declared.items():
            groups.setdefault(control.group, []).append(self.controls[name])
        if len(groups) == 1:
            box = with_class(ipywidgets.Box(*groups.values()), "explorable-controls")
            boxes = sum(isinstance(control, Toggle) for control in self.declared.values())
            return [with_class(box, "explorable-boxes") if 2 * boxes > len(self.declared) else box]
        columns = []
        for title, widgets in groups.items():
            heading = with_class(ipywidgets.HTML(html.escape(title)), "explorable-group")
            columns.append(ipywidgets.VBox([heading, *widgets]))
        return [with_class(ipywidgets.Box(columns), "explorable-controls")]

    def close(self):
        """Let go of all widgets, as when a cell is run again."""
        if self._timer is not None:
            self._timer.cancel()
        for widget in parts_of(self.widget):
            widget.close()

    # -- state --------------------------------------------------------------------------------

    @property
    def state(self) -> dict:
        """The value of each control."""
        return {name: widget.value for name, widget in self.controls.items()}

    def set(self, **state):
        """Move controls, then show the new state at once.

        Raises ValueError for a control or a value that there is not."""
        for name, value in state.items():
            require(
                name in self.declared, f"{name!r} is no control.", f"Use {tuple(self.declared)}."
            )
            control = self.declared[name]
            require(
                control.accepts(value), f"{name}={value!r} cannot be set.", f"{control.allowed()}."
            )
        self._setting = True
        try:
            for name, value in state.items():
                self.controls[name].value = value
        finally:
            self._setting = False
        self.update()

    def reset(self):
        """All controls as they were at first."""
        self.set(**{name: control.default for name, control in self.declared.items()})

    def _changed(self, change):
        """Show the new state; in a running kernel, once for all changes of a moment."""
        if self._setting:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.update()
            return
        if self._timer is None:
            self._timer = loop.call_later(GATHER_SECONDS, self.update)

    def _answer(self, content: dict):
        """A click on a cell or bar sets the controls that its panel names in `pick`."""
        if content.get("event") != "pick":
            return
        panels = [panel for row in self._rows for panel in row]
        pick = panels[content["panel"]].pick
        chosen = {
            control: self.declared[control].nearest(content[axis])
            for axis, control in pick.items()
            if content.get(axis) is not None and not self.controls[control].disabled
        }
        if chosen:
            self.set(**chosen)

    # -- from state to picture ----------------------------------------------------------------

    def update(self):
        """Compute what is missing and send the picture; a failure is shown, never raised."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._guarded(self._show_state)

    def _guarded(self, action: Callable, *arguments):
        try:
            action(*arguments)
        except ValueError as error:
            self.refusal = str(error)
            self.canvas.status = {"state": "refused", "text": self.refusal}
        except Exception as error:
            self.errors.append(error)
            self.refusal = f"internal error: {type(error).__name__}: {error}"
            self.canvas.status = {"state": "failed", "text": self.refusal}

    def _show_state(self):
        state = self.state
        self._mark_disabled(state)
        data = self.data
        rows = self.viewed()
        picture = wire.encode(rows) | {
            "heights": row_heights(rows, self.height),
            "alt": self._alt(data, **state),
            "code": self._code(**state) if self._code else "",
        }
        line = self._summary(data, **state)
        with self.canvas.hold_sync():
            self.canvas.picture = picture
            self.canvas.status = {"state": "ok", "text": ""}
        self._rows, self._line, self.refusal = rows, line, None

    @property
    def data(self):
        """What compute returned for the state shown; raises as it does."""
        state = self.state
        inputs = {name: state[name] for name in self._inputs}
        return self.results.get(tuple(inputs.items()), lambda: self._computed(inputs, state))

    def _computed(self, inputs: dict, state: dict):
        needed = self._limit_bytes(**state) if self._limit_bytes else 0
        require(
            needed <= MOST_ALLOCATED,
            f"{self.name}: this state needs {needed / 2**30:.1f} GiB, and "
            f"{MOST_ALLOCATED / 2**30:.0f} GiB is the limit here.",
            "Choose smaller sizes.",
        )
        self.canvas.status = {"state": "busy", "text": "computing"}
        return self._compute(**inputs)

    def _mark_disabled(self, state: dict):
        reasons = self._disabled(**state) if self._disabled else {}
        for name, widget in self.controls.items():
            widget.disabled = name in reasons
        sharing: dict[str, list[str]] = {}
        for name, reason in reasons.items():
            sharing.setdefault(reason, []).append(self.declared[name].caption(name))
        lines = [f"{', '.join(names)}: {reason}" for reason, names in sharing.items()]
        self.reasons.value = " · ".join(map(html.escape, lines))

    # -- what is shown, for notebooks and tests -----------------------------------------------

    @property
    def summary(self) -> str:
        """One line: the name, and the numbers shown or why there are none."""
        return f"{self.name}: {self._line if self.refusal is None else self.refusal}"

    @property
    def alt(self) -> str:
        """The finding in a sentence."""
        return self.canvas.picture.get("alt", self.refusal or "")

    def viewed(self) -> list[list[Panel]]:
        """The panels that view makes of the data; raises as the two do."""
        return rows_of(self._view(self.data, **self.state))

    def drawn(self) -> list[list[Panel]]:
        """The panels as the browser has got them, read back from the bytes."""
        return wire.decode(self.canvas.picture)

    def invariants(self) -> list[tuple[str, bool]]:
        """What must hold in the state shown, by name."""
        return list(self._invariants(self.data, **self.state)) if self._invariants else []

    def png(self) -> bytes:
        """The picture as it is stored where no kernel runs."""
        return agg.png(self._rows, PICTURE_WIDTH, self.height, self.refusal or "")

    def _repr_mimebundle_(self, include=None, exclude=None):
        live = self.widget._repr_mimebundle_()
        live, _ = live if isinstance(live, tuple) else (live, {})
        stored, metadata = theme.png_bundle(self.png(), PICTURE_WIDTH, self.alt, self.summary)
        return dict(live) | stored, metadata


def check_declaration(name, compute, controls, view_only, runs):
    require(runs in RUNS, f"{name}: runs={runs!r} is unknown.", f"Choose from {RUNS}.")
    require(
        0 < len(controls) <= MOST_CONTROLS,
        f"{name}: {len(controls)} controls.",
        f"Give 1 to {MOST_CONTROLS}: more do not fit on a screen beside the picture.",
    )
    unknown = [n for n in view_only if n not in controls]
    require(not unknown, f"{name}: view_only={unknown} is no control.", f"Use {tuple(controls)}.")
    steps = [control for control in controls.values() if isinstance(control, Step)]
    unknown = [n for step in steps for n in step.records if n not in controls]
    require(not unknown, f"{name}: records={unknown} is no control.", f"Use {tuple(controls)}.")
    taken = set(inspect.signature(compute).parameters) & set(view_only)
    require(
        not taken,
        f"{name}: compute takes {sorted(taken)}, which view_only says it does not need.",
        "Take it out of one of the two.",
    )
