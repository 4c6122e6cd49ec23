"""Every exercise names every mistake it knows, passes every right form, and never raises."""

import pytest
import torch

from course_lib.teaching.check import judge
from course_lib.teaching.exercise import Exercise, alike, observe
from course_lib.teaching.exercises import EXERCISES, load

MARGIN = 10  # a mistake differs by at least so many tolerances: no machine's rounding hides it
MATRIX = [(name, m.name, i) for name in EXERCISES for m in load(name).mistakes
          for i in range(len(m.attempts))]  # fmt: skip


@pytest.fixture(params=EXERCISES)
def exercise(request) -> Exercise:
    return load(request.param)


# The kill matrix


@pytest.mark.parametrize("name, mistake, i", MATRIX)
def test_mistake_is_caught_by_its_own_exercise_with_its_own_message(name, mistake, i):
    exercise = load(name)
    planted = next(m for m in exercise.mistakes if m.name == mistake)
    result = judge(exercise, planted.attempts[i])
    assert not result.passed
    assert result.mistake == mistake, result
    assert planted.message.rstrip(".") in result.message
    assert result.use is exercise.reference


def test_mistakes_differ_from_the_library_by_more_than_rounding(exercise):
    right = observe(exercise, exercise.reference)
    for mistake in exercise.mistakes:
        for attempt in mistake.attempts:
            pairs = zip(observe(exercise, attempt), right, strict=True)
            assert not all(alike(a, b, MARGIN * exercise.tolerance) for a, b in pairs), mistake.name


def test_zoo_is_large_and_says_different_things(exercise):
    assert len(exercise.mistakes) >= 8
    for said in ("name", "message"):
        assert len({getattr(m, said) for m in exercise.mistakes}) == len(exercise.mistakes)


def test_library_and_equivalent_forms_pass(exercise):
    assert exercise.equivalents
    for name, attempt in {"the library": exercise.reference, **exercise.equivalents}.items():
        result = judge(exercise, attempt)
        assert result.passed and result.use is attempt, f"{name}: {result}"


def test_kill_matrix(exercise, record_property):
    named = [
        all(judge(exercise, attempt).mistake == m.name for attempt in m.attempts)
        for m in exercise.mistakes
    ]
    record_property("line", f"{exercise.name}: {sum(named)} of {len(named)} mistakes named")
    assert all(named)


# The inputs hide nothing


def test_every_property_is_broken_by_some_mistake(exercise):
    cases = exercise.make_cases()
    attempts = [attempt for m in exercise.mistakes for attempt in m.attempts]
    seen = [observe(exercise, attempt) for attempt in attempts]
    for sentence, holds in exercise.properties.items():
        broken = (
            not holds(o.outputs, case)
            for outcomes in seen
            for case, o in zip(cases, outcomes, strict=True)
            if o.fault is None
        )
        assert any(broken), f"no mistake breaks {sentence!r}"


def test_cases_are_seeded_and_untouched_by_the_library(exercise):
    first, second = observe(exercise, exercise.reference), observe(exercise, exercise.reference)
    for a, b in zip(first, second, strict=True):
        assert alike(a, b, 0) and a.fault is None and not a.changed


def test_sizes_name_every_axis(exercise):
    for case, outcome in zip(
        exercise.make_cases(), observe(exercise, exercise.reference), strict=True
    ):
        for name, value in outcome.outputs.items():
            if isinstance(value, torch.Tensor):
                axes = exercise.axes[name].split()
                assert [case.sizes[axis] for axis in axes] == list(value.shape), (case.label, name)
