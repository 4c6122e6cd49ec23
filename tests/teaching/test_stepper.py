"""The stepper: a click runs one token, and what was drawn stays whatever is set later."""

import pytest
import torch

from course_lib.teaching.explorables import stepper
from course_lib.teaching.explorables.trained import smollm2

COLD = {"temperature": 0.0, "top_k": 1, "top_p": 0.5, "min_p": 0.5}
HOT = {"temperature": 2.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}


@pytest.fixture(scope="module")
def shown():
    made = stepper.generation_stepper()
    yield made
    made.close()


@pytest.fixture
def steps(shown):
    shown.reset()
    return shown


def draw(steps, clicks: int) -> list[str]:
    """Click, one token run a click at most; return what stands there."""
    for _ in range(clicks):
        steps.controls["clicks"].more.click()
        assert steps.data["ran"] <= 1
    return steps.data["tokens"]


def test_settings_change_what_comes_next_and_not_what_was_drawn(steps):
    drawn = draw(steps, 3)
    for settings in (COLD, HOT):
        before = steps.data["kept"]
        steps.set(**settings)
        assert steps.data["ran"] == 0 and steps.data["tokens"] == drawn
        assert not torch.equal(steps.data["kept"], before)


def test_each_click_draws_with_the_settings_of_its_moment(steps):
    steps.set(**HOT)
    hot = draw(steps, 2)
    steps.set(**COLD)
    mixed = draw(steps, 2)
    assert mixed[: len(hot)] == hot
    steps.controls["clicks"].over.click()
    cold = draw(steps, 4)
    model, tokenizer = smollm2()
    ids = torch.tensor([tokenizer.encode("The capital of France is")])
    assert cold == tokenizer.tokens(model.generate(ids, 4, temperature=0)[0])
    steps.controls["clicks"].over.click()
    steps.set(**HOT)
    assert len({tuple(drawn) for drawn in (mixed, cold, draw(steps, 4))}) == 3


def test_the_same_clicks_give_the_same_text_in_another_kernel(steps):
    for settings in (HOT, COLD, HOT):
        steps.set(**settings)
        draw(steps, 2)
    again = stepper.generation_stepper()
    again.set(**steps.state)
    assert again.data["tokens"] == steps.data["tokens"] and again.summary == steps.summary
    again.close()


def test_no_click_runs_two_tokens_on_the_way_back_to_an_earlier_text(steps):
    """From one branch to another and back, one token further than before."""
    hot, cold = (tuple(settings.values()) for settings in (HOT, COLD))
    for entry, clicks in ((hot, 4), (cold, 3), (hot, 5)):
        for n in range(clicks + 1):
            steps.set(clicks=(entry,) * n)
            assert steps.data["ran"] <= 1
    said = steps.state["text"]
    steps.set(text="Two and two are")
    assert steps.data["ran"] > 1
    steps.set(text=said)
    assert steps.data["ran"] == 0
    draw(steps, 1)


def test_what_is_expected_is_what_the_readable_model_computes(steps):
    steps.set(**HOT)
    draw(steps, 3)
    model, tokenizer = smollm2()
    ids = torch.tensor([tokenizer.encode("".join(steps.data["tokens"]))])
    with torch.no_grad():
        own = model(ids)[0][0, -1].softmax(-1).topk(stepper.SHOWN).values
    assert steps.data["cached"] == ids.shape[1]
    assert torch.allclose(steps.data["own"], own, atol=1e-4)
