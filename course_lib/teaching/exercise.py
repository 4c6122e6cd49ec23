"""What an exercise is, and what is seen of an attempt when it runs on the exercise's inputs."""

import inspect
import linecache
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


class Mismatch(AssertionError):
    """An attempt that is not what the exercise asks for, said in a sentence. Module 16."""


@dataclass(frozen=True)
class Case:
    """One set of seeded inputs, new for every run.

    `sizes` gives each axis letter its number, all different, so that a wrong shape can be named
    by letters. Module 16."""

    label: str  # follows "with": "a cache of 3 tokens"
    sizes: dict[str, int]
    inputs: dict[str, Any]


class Mistake:
    """A known wrong implementation, its message, and other ways to write the same mistake.

    The message names what is wrong and the idea behind it. Module 16."""

    def __init__(self, name: str, message: str, *attempts: Callable):
        self.name, self.message, self.attempts = name, message, attempts


@dataclass(frozen=True)
class Exercise:
    """A task with its answer, its inputs and everything that is known to go wrong.

    `run(attempt, **case.inputs)` returns named outputs, tensors or numbers; `axes` gives those
    that are tensors their letters. A property is a sentence about right outputs, and a function
    (outputs, case) -> bool. Module 16."""

    name: str
    module: str
    prompt: str  # one sentence
    signature: tuple[str, ...]  # parameters of the function, or of the class's forward
    reference: Callable  # the library's function or class
    stub: str  # what the notebook's cell holds
    make_cases: Callable[[], list[Case]]
    run: Callable[..., dict]
    axes: dict[str, str]
    properties: dict[str, Callable]
    equivalents: dict[str, Callable]  # other right ways: they must pass
    mistakes: tuple[Mistake, ...]
    tolerance: float = 1e-4  # absolute and relative


@dataclass(frozen=True)
class Fault:
    """An exception of an attempt, and the line of the attempt's own code where it stopped."""

    kind: str
    text: str
    line: int | None = None
    code: str = ""

    def __str__(self) -> str:
        if self.kind == "Mismatch":
            return self.text
        where = f" at line {self.line}, `{self.code}`" if self.line else ""
        return f"it stops{where}: {self.text or 'no message'} ({self.kind})"


@dataclass(frozen=True)
class Outcome:
    """What one case gave: named outputs or a fault, and the inputs that were changed in place."""

    outputs: dict = field(default_factory=dict)
    fault: Fault | None = None
    changed: tuple[str, ...] = ()


def cases_of(exercise: Exercise) -> list[Case]:
    """The exercise's cases, made anew; the global generator is left as it was. Module 16."""
    with torch.random.fork_rng(devices=[]):
        return exercise.make_cases()


def observe(exercise: Exercise, attempt: Callable) -> Iterator[Outcome]:
    """Run an attempt on every case, each with its own inputs, as far as the caller reads on.

    The global generator is left as it was. Module 16."""
    for case in cases_of(exercise):
        yield observe_case(exercise, attempt, case)


def observe_case(exercise: Exercise, attempt: Callable, case: Case) -> Outcome:
    """What an attempt does in one case; an exception becomes a Fault."""
    before = {name: t.clone() for name, t in tensors_of(case).items()}
    outputs, fault = {}, None
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        try:
            outputs = exercise.run(attempt, **case.inputs)
        except Exception as error:  # of any kind: it is shown as a sentence, not as a traceback
            fault = fault_of(error, attempt)
    changed = (name for name, t in tensors_of(case).items() if not same(t, before[name], 0))
    return Outcome(outputs, fault, tuple(changed))


def tensors_of(case: Case) -> dict[str, Tensor]:
    return {name: value for name, value in case.inputs.items() if isinstance(value, Tensor)}


def fault_of(error: Exception, attempt: Callable) -> Fault:
    """The exception in one line, with the last frame that lies in the attempt's own file."""
    files = {function.__code__.co_filename for function in own_functions(attempt)}
    steps = traceback.walk_tb(error.__traceback__)  # extract_tb would read the source of each
    places = [(frame.f_code.co_filename, line) for frame, line in steps]
    own = [place for place in places if place[0] in files]
    text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    if not own or isinstance(error, Mismatch):
        return Fault(type(error).__name__, text)
    filename, line = own[-1]
    linecache.checkcache(filename)
    code = linecache.getline(filename, line).strip()
    return Fault(type(error).__name__, text, line, code)


def own_functions(attempt) -> list:
    """The Python functions that an attempt consists of: itself, or those its class defines."""
    candidates = vars(attempt).values() if inspect.isclass(attempt) else [attempt]
    return [f for f in map(inspect.unwrap, filter(callable, candidates)) if hasattr(f, "__code__")]


def same(a, b, tolerance: float) -> bool:
    """Equal shape and values within the tolerance; NaN equals NaN, numbers must be equal."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and a == b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def alike(a: Outcome, b: Outcome, tolerance: float) -> bool:
    """Whether two attempts did the same in one case, faults included."""
    if (a.fault is None) != (b.fault is None) or a.changed != b.changed:
        return False
    if a.fault is not None:
        return (a.fault.kind, a.fault.text) == (b.fault.kind, b.fault.text)
    pairs = zip(a.outputs.items(), b.outputs.items(), strict=True)
    return all(n == m and same(x, y, tolerance) for (n, x), (m, y) in pairs)


def named(value, *names: str) -> dict[str, Tensor]:
    """What an attempt returned, as named outputs; raises Mismatch unless they are tensors."""
    values = value if isinstance(value, tuple) and len(names) > 1 else (value,)
    wanted = f"({', '.join(names)}), each a tensor" if len(names) > 1 else f"{names[0]}, a tensor"
    if len(values) != len(names) or not all(isinstance(v, Tensor) for v in values):
        raise Mismatch(f"it returns {describe(value)}; expected {wanted}")
    return dict(zip(names, values, strict=True))


def describe(value) -> str:
    if value is None:
        return "None (is the return missing?)"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}: {', '.join(type(v).__name__ for v in value)}"
    return f"a {type(value).__name__}"


def build(candidate: type[nn.Module], state: dict, *args) -> nn.Module:
    """Build a class and load the exercise's weights strictly; raises Mismatch naming a weight."""
    module = candidate(*args)
    own = module.state_dict()
    missing, extra = sorted(state.keys() - own.keys()), sorted(own.keys() - state.keys())
    if missing or extra:
        said = [
            f"{names[0]} is {word}"
            for names, word in ((missing, "missing"), (extra, "extra"))
            if names
        ]
        raise Mismatch(f"its weights have other names than the library's: {' and '.join(said)}")
    for name, weight in state.items():
        if own[name].shape != weight.shape:
            raise Mismatch(
                f"its weight {name} is {tuple(own[name].shape)}; expected {tuple(weight.shape)}"
            )
    module.load_state_dict(state)
    return module


def gradient(out: Tensor, of: Tensor) -> Tensor:
    """d sum(out^2) / d of; zeros where none flows."""
    if not out.requires_grad:
        return torch.zeros_like(of)
    (found,) = torch.autograd.grad(
        out.square().sum(), of, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return found
