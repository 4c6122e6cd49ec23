"""Faults people hit in generation: A47-A50. Right values, and the value that each fault gives."""

import pytest
import torch

from course_lib import ModernDecoder, generate, next_token_probabilities, sample
from tests.helpers import jittered, numbers, small


def test_a47_temperature_0():
    state = torch.get_rng_state()
    for logits, right in (((1, 3, 2), 1), ((0, -1, 2), 2)):
        assert sample(numbers(logits), temperature=0).item() == right
    assert torch.equal(torch.get_rng_state(), state)
    divided = (numbers(1, 3, 2) / 0).softmax(-1)
    assert divided.isnan().all()
    with pytest.raises(ValueError, match="temperature=-0.5"):
        sample(numbers([1, 3, 2]), temperature=-0.5)
    for tiny in (1e-30, 1e-44, 1e-300):
        assert next_token_probabilities(numbers(1, 3, 2), tiny).tolist() == [0, 1, 0]


def kept(probs, **how) -> list[int]:
    return next_token_probabilities(numbers(*probs).log(), **how).nonzero().flatten().tolist()


def test_a48_top_k_and_top_p_limits():
    assert kept((0.2, 0.3, 0.5), top_k=100) == [0, 1, 2]
    probs = (0.5, 0.3, 0.15, 0.05)
    for p, right, unshifted in (
        (0.4, [0], []),
        (0.79, [0, 1], [0]),
        (0.81, [0, 1, 2], [0, 1]),
        (1.0, [0, 1, 2, 3], [0, 1, 2, 3]),
    ):
        assert kept(probs, top_p=p) == right
        rule = (numbers(*probs).cumsum(0) <= p + 1e-6).nonzero().flatten().tolist()
        assert rule == unshifted
    assert kept(probs, top_k=1) == [0] and kept(probs, min_p=0.5) == [0, 1]


class Scripted(ModernDecoder):
    """Says what it is told, a column a call, and counts its calls."""

    def script(self, *rows):
        self.columns, self.calls = torch.tensor(rows).T, 0
        return self

    def forward(self, ids, caches=None, pos_offset=0, attention_mask=None):
        logits, router_logits = super().forward(ids, caches, pos_offset, attention_mask)
        says = torch.nn.functional.one_hot(self.columns[self.calls], logits.shape[-1])
        self.calls += 1
        return says.unsqueeze(1).float().expand_as(logits), router_logits


@pytest.mark.parametrize("use_cache", [True, False])
def test_a49_eos_in_a_batch(use_cache):
    model = Scripted(small(n_experts=0)).script([5, 2, 7, 7, 7, 7], [6, 6, 6, 2, 7, 7])
    how = dict(temperature=0, use_cache=use_cache)
    out = generate(model, [[9], [9]], 6, eos_id=2, pad_id=0, **how)
    assert out[:, 1:].tolist() == [[5, 2, 0, 0], [6, 6, 6, 2]]  # not 7 after 2
    assert model.calls == 4
    several = generate(model.script([5, 3, 7], [2, 6, 6]), [[9], [9]], 3, eos_id=[2, 3], **how)
    assert several[:, 1:].tolist() == [[5, 3], [2, 2]]


def test_a50_zero_new_tokens_and_the_empty_prompt():
    model = Scripted(small(n_experts=0)).script([5], [5])
    prompt = torch.tensor([[1, 2, 3]])
    assert torch.equal(generate(model, prompt, 0), prompt) and model.calls == 0
    for empty in (torch.empty(1, 0, dtype=torch.long), torch.empty(0, 3, dtype=torch.long)):
        with pytest.raises(ValueError, match="holds no prompt"):
            generate(model, empty, 3)
    for empty in ([], [[]], [[1], []]):
        with pytest.raises(ValueError, match=r"prompt|rows="):
            generate(model, empty, 3)
    assert model.calls == 0
    assert torch.empty(1, 0, 4)[:, -1:].shape == (1, 0, 4)  # torch: silently nothing


def test_a50_the_returned_ids_can_be_trained_on():
    model = jittered(small())
    out = generate(model, [[1, 2]], 3, seed=1)
    model(out)[0].sum().backward()
    assert out.dtype == torch.int64 and not out.is_inference()
