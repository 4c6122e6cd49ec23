"""The first thing that differs between an attempt and the library, as one sentence."""

import inspect
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .exercise import Case, Exercise, Outcome, alike, cases_of, observe, same

AXIS_WORDS = {
    "B": "row", "T": "token", "N": "token", "S": "key", "H": "head", "K": "key/value head",
    "D": "channel", "h": "channel", "E": "expert", "k": "slot", "V": "vocabulary entry",
}  # fmt: skip


def wrong_kind(exercise: Exercise, attempt) -> str | None:
    """Type first: a class where the library has a class, a function where it has a function."""
    call = f'check("{exercise.name}", ...)'
    if inspect.isclass(exercise.reference) == inspect.isclass(attempt) and callable(attempt):
        return None
    if inspect.isclass(exercise.reference):
        return f"{call} takes the class itself, not {kind_of(attempt)}"
    return f"{call} takes a function, not {kind_of(attempt)}"


def kind_of(value) -> str:
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"
    return f"an object of type {type(value).__name__}"


def wrong_signature(exercise: Exercise, attempt: Callable) -> str | None:
    """Then the parameters, by name and order; more of them are welcome if they have defaults."""
    is_class = inspect.isclass(attempt)
    function = getattr(attempt, "forward", None) if is_class else attempt
    if function is None:
        return "the class has no forward method"
    try:
        parameters = list(inspect.signature(function).parameters.values())[is_class:]
    except (TypeError, ValueError):  # a builtin without a signature: running it will tell
        return None
    wanted, named = exercise.signature, tuple(p.name for p in parameters)
    more = parameters[len(wanted) :]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p for p in more if p.default is p.empty and p.kind not in variadic]
    if named[: len(wanted)] == wanted and not needed:
        return None
    return f"its parameters are ({', '.join(named)}); expected ({', '.join(wanted)})"


def faults(exercise: Exercise, case: Case, got: Outcome, want: Outcome):
    if got.fault is not None:
        yield str(got.fault)


def shapes(exercise: Exercise, case: Case, got: Outcome, want: Outcome):
    for name, expected in want.outputs.items():
        value, axes = got.outputs[name], exercise.axes.get(name, "").split()
        if not isinstance(expected, Tensor) or value.shape == expected.shape:
            continue
        right, wrong = (letters(t.shape, axes, case.sizes) for t in (expected, value))
        yield f"{name} has {wrong} = {tuple(value.shape)}; expected {right} = " + str(
            tuple(expected.shape)
        )


def letters(shape: Iterable[int], axes: list[str], sizes: dict[str, int]) -> str:
    """(2, 5, 24) as "(B, T, D)": the expected letter where its size fits, else any that does."""
    words = []
    for place, size in enumerate(shape):
        fitting = [letter for letter, known in sizes.items() if known == size]
        expected = axes[place] if place < len(axes) else None
        fallback = fitting[0] if fitting else str(size)
        words.append(expected if expected in fitting else fallback)
    return f"({', '.join(words)})"


def dtypes(exercise: Exercise, case: Case, got: Outcome, want: Outcome):
    for name, expected in want.outputs.items():
        if isinstance(expected, Tensor) and got.outputs[name].dtype != expected.dtype:
            yield f"{name} is {short(got.outputs[name].dtype)}; expected {short(expected.dtype)}"


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def changes(exercise: Exercise, case: Case, got: Outcome, want: Outcome):
    for name in got.changed:
        yield f"it changes its input {name} in place; the caller still needs it"


def properties(exercise: Exercise, case: Case, got: Outcome, want: Outcome):
    for sentence, holds in exercise.properties.items():
        if not holds(got.outputs, case):
            yield f"this should hold: {sentence}"


def values(exercise: Exercise, case: Case, got: Outcome, want: Outcome):
    for name, expected in want.outputs.items():
        value = got.outputs[name]
        if same(value, expected, exercise.tolerance):
            continue
        if isinstance(expected, Tensor):
            axes = exercise.axes.get(name, "").split()
            yield f"{name} {difference(value.detach(), expected.detach(), axes, exercise)}"
        else:
            yield f"{name} is {value}; expected {expected}"


def difference(got: Tensor, want: Tensor, axes: list[str], exercise: Exercise) -> str:
    """Where two tensors differ first, counted along the tokens if there are any, and how much."""
    tol = exercise.tolerance
    wrong = ~torch.isclose(got, want, rtol=tol, atol=tol, equal_nan=True)
    order = sorted(range(got.dim()), key=lambda axis: axes[axis] not in "TN")
    first = wrong.permute(order).nonzero()[0].tolist()
    index = tuple(place for _, place in sorted(zip(order, first, strict=True)))
    place = ", ".join(f"{AXIS_WORDS.get(a, a)} {i}" for a, i in zip(axes, index, strict=True))
    largest = (got.double() - want.double())[wrong].abs().max().item()
    found = f"{got[index].item():.4f}, expected {want[index].item():.4f}"
    if got.numel() == 1:
        return f"is {found}"
    return (
        f"differs first at {place}: {found} (largest difference {largest:.4f}, "
        f"{int(wrong.sum())} of {wrong.numel()} values differ)"
    )


STAGES = (faults, shapes, dtypes, changes, properties, values)


def first_problem(exercise: Exercise, got: list[Outcome], want: list[Outcome]) -> str | None:
    """The first sentence of the first case that has one, and which case shows it."""
    for case, *outcomes in zip(cases_of(exercise), got, want, strict=True):
        for stage in STAGES:
            for sentence in stage(exercise, case, *outcomes):
                return f"with {case.label}, {sentence}"
    return None


def recognise(exercise: Exercise, got: list[Outcome]):
    """The known mistake that does in every case what the attempt did, or None."""
    for mistake in exercise.mistakes:
        for attempt in mistake.attempts:
            theirs = observe(exercise, attempt)
            pairs = zip(got, theirs, strict=True)
            if all(alike(a, b, exercise.tolerance) for a, b in pairs):
                return mistake
    return None
