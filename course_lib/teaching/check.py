"""Check what a student wrote against the library, name the mistake, and let the notebook go on.

In a notebook, one cell holds the stub and its check; its tag tells tools which exercise it is:

    # %% id="exercise-top-k-routing" tags=["exercise:top_k_routing"]
    class MyMoE(MoE):
        def forward(self, x):
            ...  # your turn

    MyMoE = check("top_k_routing", MyMoE).use

The text of that cell is `stubs.exercise_stub(name)`; `stubs.fill_stubs` writes the library's
answer into it. Unwritten, or wrong, `.use` is the library's version, so all later cells run.
"""

import ast
import difflib
import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

from .compare import first_problem, recognise, wrong_kind, wrong_signature
from .exercise import Case, Exercise, Mismatch, Mistake, observe, own_functions
from .exercises import EXERCISES, load

__all__ = ["Case", "Exercise", "Mismatch", "Mistake", "Result", "check", "judge"]

GO_ON = "The library's version is used."


@dataclass(frozen=True)
class Result:
    """The verdict on one attempt; `use` is the attempt if it passed, else the library's version.

    Module 16."""

    name: str
    passed: bool
    message: str
    use: Any
    mistake: str | None = None  # the name of the known mistake, if it is one
    unwritten: bool = False

    def __repr__(self) -> str:
        return f"{self.name}: {self.message}"

    def _ipython_display_(self):
        """Nothing: check has printed the line, and a cell that ends in it would show it twice."""


def check(name: str, attempt, strict: bool = False) -> Result:
    """Print in one line whether `attempt` does what the exercise `name` asks for.

    Never raises, whatever the attempt does; with strict, Mismatch unless it passed.
    Module 16."""
    if name in EXERCISES:
        result = judge(load(name), attempt)
    else:
        near = difflib.get_close_matches(str(name), EXERCISES, n=1, cutoff=0.4)
        hint = f"Did you mean {near[0]!r}?" if near else f"Choose from {', '.join(EXERCISES)}."
        result = Result(str(name), False, f"there is no such exercise. {hint}", attempt)
    if strict and not result.passed:
        raise Mismatch(repr(result))
    print(result)
    return result


def judge(exercise: Exercise, attempt) -> Result:
    """Type, parameter names, shapes, properties, values, in this order; known mistakes by name.

    Module 16."""
    if unwritten(attempt, exercise.reference):
        return not_written(exercise)
    problem = wrong_kind(exercise, attempt) or wrong_signature(exercise, attempt)
    if problem:
        return failed(exercise, problem)
    got, want = (list(observe(exercise, f)) for f in (attempt, exercise.reference))
    if any(o.fault and o.fault.kind == "NotImplementedError" for o in got):
        return not_written(exercise)
    problem = first_problem(exercise, got, want)
    if problem is None:
        line = f"passed: equal to the library's in {len(want)} cases, {len(exercise.properties)} "
        return Result(exercise.name, True, line + "properties hold.", attempt)
    mistake = recognise(exercise, got)
    if mistake is None:
        return failed(exercise, problem)
    return failed(exercise, mistake.message, mistake.name)


def not_written(exercise: Exercise) -> Result:
    line = "not written yet: the library's version is used."
    return Result(exercise.name, False, line, exercise.reference, unwritten=True)


def failed(exercise: Exercise, problem: str, mistake: str | None = None) -> Result:
    line = f"not yet: {problem.rstrip('.')}. {GO_ON}"
    return Result(exercise.name, False, line, exercise.reference, mistake)


def unwritten(attempt, reference) -> bool:
    """A stub: no attempt, a forward that is inherited, a body of pass, or a `...` left in it."""
    if attempt is None or attempt is ...:
        return True
    if inspect.isclass(attempt) and inspect.isclass(reference) and attempt is not reference:
        if getattr(attempt, "forward", None) is getattr(reference, "forward", None):
            return True
    return any(map(is_stub, own_functions(attempt)))


def is_stub(function) -> bool:
    """Whether a function's text holds a `...` that stands for something, or does nothing."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # no text to read: running it will tell
        return False
    body = getattr(tree.body[0], "body", None)
    if isinstance(body, list) and all(isinstance(n, ast.Pass) or is_text(n) for n in body):
        return True
    # x[..., 0] and tuple[int, ...] are code, not gaps
    inside = {id(n) for s in ast.walk(tree) if isinstance(s, ast.Subscript) for n in ast.walk(s)}
    dots = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value is ...]
    return any(id(n) not in inside for n in dots)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)
