"""Every exercise names every mistake it knows, passes every right form, and never raises."""

import pytest
import torch

import course_lib
from course_lib import Config, MoE, next_token_loss
from course_lib.teaching import check
from course_lib.teaching.check import Mismatch, judge
from course_lib.teaching.exercise import Exercise, alike, observe
from course_lib.teaching.exercises import EXERCISES, load
from course_lib.teaching.stubs import exercise_stub, fill_stubs

MARGIN = 10  # a mistake differs by at least so many tolerances: no machine's rounding hides it


@pytest.fixture(params=EXERCISES)
def exercise(request) -> Exercise:
    return load(request.param)


# The kill matrix


def is_named(exercise: Exercise, mistake, attempt) -> bool:
    """Caught by the exercise's own check, as this mistake and no other, in its own words."""
    result = judge(exercise, attempt)
    own = result.mistake == mistake.name and mistake.message.rstrip(".") in result.message
    return own and not result.passed and result.use is exercise.reference


def test_every_planted_mistake_is_named(exercise, record_property):
    missed = [
        f"{mistake.name}: {attempt.__name__}"
        for mistake in exercise.mistakes
        for attempt in mistake.attempts
        if not is_named(exercise, mistake, attempt)
    ]
    named = len(exercise.mistakes) - len({name.split(":")[0] for name in missed})
    line = f"{exercise.name}: {named} of {len(exercise.mistakes)} mistakes named"
    record_property("line", line)
    assert not missed


def test_mistakes_differ_from_the_library_by_more_than_rounding(exercise):
    right = list(observe(exercise, exercise.reference))
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


# The inputs hide nothing


def test_every_property_is_broken_by_some_mistake(exercise):
    cases = exercise.make_cases()
    attempts = [attempt for m in exercise.mistakes for attempt in m.attempts]
    seen = [list(observe(exercise, attempt)) for attempt in attempts]
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


# The stub's cell, unwritten and answered


def run_cell(text: str, tmp_path) -> dict:
    """Execute a cell as a notebook does: its text can be read back, by line."""
    file = tmp_path / "cell.py"
    file.write_text(text, encoding="utf-8")
    namespace = {name: getattr(course_lib, name) for name in course_lib.__all__}
    namespace |= {"check": check, "torch": torch, "__name__": "cell"}
    exec(compile(text, str(file), "exec"), namespace)
    return namespace


def test_unwritten_stub_says_one_line_and_the_library_goes_on(exercise, tmp_path, capsys):
    names = run_cell(exercise_stub(exercise.name), tmp_path)
    line = f"{exercise.name}: not written yet: the library's version is used.\n"
    assert capsys.readouterr().out == line
    assert exercise.reference in names.values()


def test_stub_answered_from_the_library_passes(exercise, tmp_path, capsys):
    header = f'# %% id="exercise" tags=["exercise:{exercise.name}"]\n'
    before, after = '# %% id="a"\nx = 1\n\n', '\n# %% id="b"\ny = 2\n'
    filled = fill_stubs(before + header + exercise_stub(exercise.name) + "\n" + after)
    assert filled.startswith(before + header) and filled.endswith(after)
    names = run_cell(filled, tmp_path)
    assert capsys.readouterr().out.startswith(f"{exercise.name}: passed: ")
    assert exercise.reference not in [names[n] for n in names if n not in course_lib.__all__]


def test_fill_stubs_leaves_untagged_cells_alone():
    text = f'# %% id="a"\n{exercise_stub("top_k_routing")}\n# %% [markdown] id="b"\n# Text\n'
    assert fill_stubs(text) == text
    assert fill_stubs("x = 1\n") == "x = 1\n"


def test_stub_fits_a_cell(exercise):
    text = exercise_stub(exercise.name)
    assert len(text.splitlines()) <= 25 and max(map(len, text.splitlines())) <= 100
    assert f'check("{exercise.name}", ' in text and ".use" in text


# What check says


def lines_of(capsys) -> str:
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and out.endswith("\n")
    return out[:-1]


@pytest.mark.parametrize("body", ["...", "pass", '"""Text."""', "raise NotImplementedError"])
def test_every_kind_of_empty_body_is_unwritten(body, tmp_path, capsys):
    text = f"def f(logits, ids, ignore_index=-100):\n    {body}\nr = check('next_token_loss', f)\n"
    result = run_cell(text, tmp_path)["r"]
    assert "not written yet" in lines_of(capsys)
    assert result.unwritten and not result.passed


def test_a_gap_left_in_the_middle_is_unwritten_but_an_ellipsis_index_is_code(tmp_path):
    gap = (
        "def f(logits, ids, ignore_index=-100):\n    predicted = ...\n    return predicted.mean()\n"
    )
    code = "def f(logits, ids, ignore_index=-100):\n    return logits[..., 0].mean()\n"
    for text, stub in ((gap, True), (code, False)):
        assert run_cell(text + "r = check('next_token_loss', f)\n", tmp_path)["r"].unwritten is stub


def test_inherited_forward_is_unwritten():
    class MyMoE(MoE):
        pass

    assert check("top_k_routing", MyMoE).unwritten
    assert check("top_k_routing", None).unwritten


def test_missing_return_is_not_taken_for_unwritten():
    def f(logits, ids, ignore_index=-100):
        logits.mean()

    assert "None (is the return missing?)" in check("next_token_loss", f).message


def test_type_comes_first_then_the_parameters(capsys):
    assert "takes a function, not the class MoE" in check("next_token_loss", MoE).message
    assert (
        "takes the class itself, not the function <lambda>"
        in check("top_k_routing", lambda x: x).message
    )
    assert "not an object of type int" in check("next_token_loss", 3).message
    message = check("next_token_loss", lambda ids, logits, ignore_index: logits.mean()).message
    assert (
        "its parameters are (ids, logits, ignore_index); expected (logits, ids, ignore" in message
    )
    assert "not an object of type MoE" in check("top_k_routing", MoE(Config())).message


def test_more_parameters_are_welcome_if_they_have_defaults():
    def f(logits, ids, ignore_index=-100, extra=None, **more):
        return next_token_loss(logits, ids, ignore_index)

    assert check("next_token_loss", f).passed


def test_shape_is_named_by_axis_letters():
    class Swapped(MoE):
        def forward(self, x):
            out, router_logits = super().forward(x)
            return out.transpose(1, 2), router_logits

    message = check("top_k_routing", Swapped).message
    assert "out has (B, D, T) = (2, 24, 7); expected (B, T, D) = (2, 7, 24)" in message


def test_first_difference_is_located_and_measured():
    class OneRowOff(MoE):
        def forward(self, x):
            out, router_logits = super().forward(x)
            return torch.cat((out[:-1], out[-1:] + 0.25)), router_logits

    message = check("top_k_routing", OneRowOff).message
    assert "this should hold: a token's result does not depend on its neighbours" in message

    def off(logits, ids, ignore_index=-100):
        return next_token_loss(logits, ids, ignore_index) * (2 if ignore_index == 0 else 1)

    *_, padded, _, _ = observe(load("next_token_loss"), next_token_loss)
    right = padded.outputs["the loss"].item()
    said = f"with ignore_index=0, the loss is {2 * right:.4f}, expected {right:.4f}."
    assert said in check("next_token_loss", off).message

    def gradient_off(logits, ids, ignore_index=-100):
        extra = logits[1, 2, 5] + logits[0, 4, 1]
        return next_token_loss(logits, ids, ignore_index) + 0.25 * (extra - extra.detach())

    # row 0 comes first in memory, but token 2 comes first in time
    message = check("next_token_loss", gradient_off).message
    assert (
        "the gradient of the logits differs first at row 1, token 2, vocabulary entry 5" in message
    )
    assert "(largest difference 0.2500, 2 of 132 values differ)" in message


def test_other_dtype_and_changed_input_are_named():
    def double(logits, ids, ignore_index=-100):
        return next_token_loss(logits, ids, ignore_index).double()

    def tidy(logits, ids, ignore_index=-100):
        loss = next_token_loss(logits, ids, ignore_index)
        ids[ids == ignore_index] = 7
        return loss

    assert "the loss is float64; expected float32" in check("next_token_loss", double).message
    assert "it changes its input ids in place" in check("next_token_loss", tidy).message


def test_known_mistake_that_also_changes_its_input_is_not_taken_for_the_mistake_alone():
    def summed_and_tidied(logits, ids, ignore_index=-100):
        count = (ids[:, 1:] != ignore_index).sum()
        loss = next_token_loss(logits, ids, ignore_index) * count
        ids[ids == ignore_index] = 7
        return loss

    assert check("next_token_loss", summed_and_tidied).mistake is None


def test_exception_is_a_sentence_with_the_attempts_own_line(tmp_path, capsys):
    text = (
        "def f(logits, ids, ignore_index=-100):\n"
        "    shifted = logits[:, :-1]\n"
        "    return torch.nn.functional.cross_entropy(shifted, ids)\n"
        "r = check('next_token_loss', f)\n"
    )
    result = run_cell(text, tmp_path)["r"]
    line = lines_of(capsys)
    assert "it stops at line 3, `return torch.nn.functional.cross_entropy(shifted, ids)`: " in line
    assert "(ValueError)" in line or "(RuntimeError)" in line
    assert "Traceback" not in line and result.use is next_token_loss


def test_weights_of_another_name_or_shape_are_named():
    class Renamed(MoE):
        def __init__(self, cfg):
            super().__init__(cfg)
            self.router_gate = self.gate
            del self.gate

        def forward(self, x):
            return x, x

    message = check("top_k_routing", Renamed).message
    assert "gate.weight is missing and router_gate.weight is extra" in message


def test_unknown_name_gets_a_hint_and_nothing_is_raised(capsys):
    result = check("top_k_rooting", MoE)
    assert lines_of(capsys) == (
        "top_k_rooting: there is no such exercise. Did you mean 'top_k_routing'?"
    )
    assert result.use is MoE and not result.passed


def test_strict_raises_unless_it_passed():
    assert check("top_k_routing", MoE, strict=True).passed
    for wrong in (None, load("top_k_routing").mistakes[0].attempts[0]):
        with pytest.raises(Mismatch, match="top_k_routing: not "):
            check("top_k_routing", wrong, strict=True)


def test_result_is_printed_once_and_says_the_same_as_its_repr(capsys):
    result = check("top_k_routing", MoE)
    assert repr(result) == lines_of(capsys)
    assert result._ipython_display_() is None and capsys.readouterr().out == ""


def test_check_leaves_the_global_generator_alone():
    class Draws(MoE):
        def forward(self, x):
            torch.rand(3)
            return super().forward(x)

    before = torch.get_rng_state()
    first, second = check("top_k_routing", Draws), check("top_k_routing", Draws)
    assert torch.equal(before, torch.get_rng_state())
    assert first.passed and first.message == second.message
