"""The controls of an explorable as declarations; each makes its own widget."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import ipywidgets
import traitlets

from course_lib.model.checks import require
from course_lib.teaching.panels import compact

LABEL_WIDTH = "190px"
FEW_OPTIONS, BUTTONS_WIDTH = 4, 205  # at most so many, in so many pixels: buttons, else a menu
CHARACTER, BUTTON_FRAME = 7.5, 20  # pixels of a letter, and of a button round its letters
SAMPLE_TEXTS = ("a", "The cat sat on the mat.", "naïve café 你好", "   ", "x" * 40)


@dataclass(frozen=True, kw_only=True)
class Control:
    """What all controls share. A unit stands behind the label, help appears on hover."""

    label: str = ""
    unit: str = ""
    help: str = ""
    group: str = ""

    def caption(self, name: str) -> str:
        text = self.label or name
        return f"{text} ({self.unit})" if self.unit else text

    def connect(self, widget, widgets: Mapping):
        """Called once the widgets of all controls exist, by name."""

    def common(self, name: str) -> dict:
        return {
            "description": self.caption(name),
            "tooltip": self.help or self.caption(name),
            "style": {"description_width": LABEL_WIDTH},
            "layout": ipywidgets.Layout(width="100%", min_width="300px", margin="0"),
        }


def readout(value) -> str:
    """A number as it fits beside its slider: 10,000 and 1,048,576 in full, 100,000,000 as 100M."""
    if isinstance(value, int | float) and abs(value) >= 10_000 and value == int(value):
        return compact(value) if abs(value) >= 10_000_000 else f"{value:,.0f}"
    return str(value)


def is_whole(*values) -> bool:
    return all(isinstance(v, int) and not isinstance(v, bool) for v in values)


@dataclass(frozen=True)
class Slider(Control):
    """A number from `low` to `high`: whole if all three are, else in steps of `step`.

    log=True offers 1, 2, 3, 4, 6, 8, 12, ...; `values` offers exactly these. Module 16."""

    default: float
    low: float | None = None
    high: float | None = None
    step: float | None = None
    log: bool = False
    values: tuple | None = None

    def __post_init__(self):
        if self.values is None:
            require(
                self.low is not None and self.high is not None and self.low < self.high,
                f"low={self.low} and high={self.high} make no range.",
                "Give low below high, or values=(...).",
            )
        require(
            self.accepts(self.default),
            f"default={self.default} cannot be chosen.",
            f"Choose {self.allowed()}.",
        )

    def options(self) -> tuple | None:
        if self.values is not None:
            return tuple(self.values)
        return log_steps(self.low, self.high, self.default) if self.log else None

    def extremes(self) -> tuple:
        options = self.options()
        return (options[0], options[-1]) if options else (self.low, self.high)

    def sample(self, rng: random.Random):
        if self.options():
            return rng.choice(self.options())
        if self.whole:
            return rng.randint(self.low, self.high)
        steps = round((self.high - self.low) / self.grid)
        return min(self.high, round(self.low + rng.randint(0, steps) * self.grid, 10))

    @property
    def whole(self) -> bool:
        return is_whole(self.default, self.low, self.high) and not isinstance(self.step, float)

    @property
    def grid(self) -> float:
        return self.step or (1 if self.whole else (self.high - self.low) / 100)

    def accepts(self, value) -> bool:
        if self.options():
            return value in self.options()
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and self.low <= value <= self.high and (not self.whole or value == int(value))

    def allowed(self) -> str:
        options = self.options()
        return f"one of {options}" if options else f"from {self.low} to {self.high}"

    def nearest(self, index: int):
        """The value that a click on cell `index` stands for."""
        if self.options():
            return min(self.options(), key=lambda value: abs(value - index))
        return max(self.low, min(self.high, index))

    def widget(self, name: str):
        common, options = self.common(name), self.options()
        if options:
            pairs = [(readout(value), value) for value in options]
            return ipywidgets.SelectionSlider(options=pairs, value=self.default, **common)
        kind = ipywidgets.IntSlider if self.whole else ipywidgets.FloatSlider
        if not self.whole:
            decimals = max(0, -math.floor(math.log10(self.grid) + 1e-9))
            common["readout_format"] = f".{decimals}f"
        return kind(self.default, min=self.low, max=self.high, step=self.grid, **common)


def log_steps(low, high, default) -> tuple:
    """Steps of about 1.4 between low and high, both ends and the default among them."""
    if is_whole(low, high):
        powers = [2**n for n in range(high.bit_length() + 1)]
        steps = powers + [3 * p for p in powers]
    else:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        steps = [m * 10.0**e for e in range(first, last + 1) for m in (1, 1.5, 2, 3, 5, 7)]
        steps = [float(f"{step:.2g}") for step in steps]
    return tuple(sorted({s for s in steps if low < s < high} | {low, high, default}))


@dataclass(frozen=True)
class Choice(Control):
    """One of `options`: buttons where they are few and short, else a menu. Module 16."""

    default: object
    options: tuple

    def __post_init__(self):
        object.__setattr__(self, "options", tuple(self.options))
        require(
            self.default in self.options,
            f"default={self.default!r} is no option.",
            f"Choose from {self.options}.",
        )

    def extremes(self) -> tuple:
        return self.options

    def sample(self, rng: random.Random):
        return rng.choice(self.options)

    def accepts(self, value) -> bool:
        return value in self.options

    def allowed(self) -> str:
        return f"one of {self.options}"

    def nearest(self, index: int):
        return self.options[max(0, min(len(self.options) - 1, index))]

    def widget(self, name: str):
        labels = [str(option) for option in self.options]
        width = CHARACTER * sum(map(len, labels)) + BUTTON_FRAME * len(labels)
        few = len(labels) <= FEW_OPTIONS and width <= BUTTONS_WIDTH
        kind = ipywidgets.ToggleButtons if few else ipywidgets.Dropdown
        pairs = list(zip(labels, self.options, strict=True))
        common = self.common(name)
        if few:
            common["style"]["button_width"] = "auto"
        return kind(options=pairs, value=self.default, **common)


@dataclass(frozen=True)
class Toggle(Control):
    """Yes or no. Module 16."""

    default: bool = False

    def extremes(self) -> tuple:
        return (False, True)

    def sample(self, rng: random.Random):
        return rng.random() < 0.5

    def accepts(self, value) -> bool:
        return isinstance(value, bool)

    def allowed(self) -> str:
        return "True or False"

    def nearest(self, index: int):
        return bool(index)

    def widget(self, name: str):
        return ipywidgets.Checkbox(self.default, indent=False, **self.common(name))


@dataclass(frozen=True)
class Text(Control):
    """The reader's own text; computed when they press Enter or leave the field. Module 16."""

    default: str = ""
    longest: int = 2000  # characters

    def extremes(self) -> tuple:
        return ("", "word " * 60)

    def sample(self, rng: random.Random):
        return rng.choice((*SAMPLE_TEXTS, self.default))

    def accepts(self, value) -> bool:
        return isinstance(value, str) and len(value) <= self.longest

    def allowed(self) -> str:
        return f"a text of at most {self.longest} characters"

    def nearest(self, index: int):
        return self.default

    def widget(self, name: str):
        return ipywidgets.Text(self.default, continuous_update=False, **self.common(name))


class StepButton(ipywidgets.HBox):
    """A button that adds an entry to `value` a click, and one that starts over."""

    value = traitlets.Tuple()
    disabled = traitlets.Bool(False)
    tooltip = traitlets.Unicode("")

    def __init__(self, limit: int, caption: str, tooltip: str):
        self.limit, self.caption = limit, caption
        self.recorded: list[ipywidgets.Widget] = []  # their values make the entry of a click
        wide = {"width": "auto"}  # as wide as what stands on it
        self.more = ipywidgets.Button(
            description=caption, tooltip=tooltip, button_style="primary", layout=wide
        )
        self.over = ipywidgets.Button(
            description="start over", tooltip="back to step 0", layout=wide
        )
        self.more.on_click(lambda button: self.click())
        self.over.on_click(lambda button: self.set_trait("value", ()))
        # the buttons stand under the fields of the other controls, not under their labels
        super().__init__([self.more, self.over])
        self.layout.padding = f"0 0 0 {LABEL_WIDTH}"
        self.observe(lambda change: self.show(), ["value", "disabled", "tooltip"])
        self.show()

    def click(self):
        if len(self.value) < self.limit:
            self.value = (*self.value, tuple(widget.value for widget in self.recorded))

    def show(self):
        clicks = len(self.value)
        self.more.description = f"{self.caption} ({clicks})"
        self.more.disabled = self.disabled or clicks >= self.limit
        self.over.disabled = self.disabled or clicks == 0


@dataclass(frozen=True)
class Step(Control):
    """A button; its value has an entry for each click, at most `limit`.

    The entry holds what the controls `records` stood at: what a click did stays as it was when
    they move on. Module 16."""

    text: str
    limit: int = 16
    records: Mapping[str, Control] = field(default_factory=dict)
    default: tuple = ()

    def extremes(self) -> tuple:
        """No click, and all clicks with every recorded control at one end, then at the other."""
        ends = [control.extremes() for control in self.records.values()]
        low, high = (tuple(values[end] for values in ends) for end in (0, -1))
        return tuple(dict.fromkeys([(), (low,) * self.limit, (high,) * self.limit]))

    def sample(self, rng: random.Random) -> tuple:
        controls = self.records.values()
        clicks = rng.randint(0, self.limit)
        return tuple(tuple(control.sample(rng) for control in controls) for _ in range(clicks))

    def accepts(self, value) -> bool:
        few = isinstance(value, tuple) and len(value) <= self.limit
        return few and all(map(self.accepts_click, value))

    def accepts_click(self, entry) -> bool:
        controls = self.records.values()
        fits = isinstance(entry, tuple) and len(entry) == len(controls)
        return fits and all(c.accepts(value) for c, value in zip(controls, entry, strict=True))

    def allowed(self) -> str:
        entry = f"({', '.join(self.records)})" if self.records else "()"
        return f"a tuple of at most {self.limit} clicks, each {entry}"

    def nearest(self, index: int) -> tuple:
        entry = tuple(control.default for control in self.records.values())
        return (entry,) * max(0, min(self.limit, index))

    def widget(self, name: str):
        return StepButton(self.limit, self.text, self.help or self.caption(name))

    def connect(self, widget, widgets: Mapping):
        widget.recorded = [widgets[name] for name in self.records]
