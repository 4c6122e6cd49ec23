"""The grouped form of a MoE layer equals the loop, in values and in gradients."""

import pytest
import torch

from course_lib import Config, MoE, Router
from course_lib.model import grouped

SIZES = dict(d_model=16, d_expert=8, vocab_size=11)


def run(form: str, E: int, k: int, tokens: int):
    """Output and every gradient of one layer, built and fed the same for every form."""
    torch.manual_seed(0)
    cfg = Config(**SIZES, n_experts=E, n_experts_active=k, router=Router(form=form))
    layer, x = MoE(cfg), torch.randn(1, tokens, 16, requires_grad=True)
    out = layer(x)[0]
    out.square().sum().backward()
    return [out, x.grad, *(weight.grad for weight in layer.parameters())]


@pytest.mark.parametrize(("E", "k", "tokens"), ((4, 2, 1), (4, 4, 7), (32, 2, 5), (8, 2, 300)))
def test_equals_the_loop_in_values_and_gradients(E, k, tokens):
    expected = run("loop", E, k, tokens)
    found = run("grouped", E, k, tokens)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() < 1e-5 * max(1.0, b.abs().max().item())


def test_the_comparison_notices_a_lost_gradient(monkeypatch):
    right = grouped.expert_products_backward

    def wrong(*given):
        by_rows, by_weights = right(*given)
        return by_rows, [torch.zeros_like(by_weights[0]), *by_weights[1:]]

    monkeypatch.setattr(grouped, "expert_products_backward", wrong)
    with pytest.raises(AssertionError):
        test_equals_the_loop_in_values_and_gradients(4, 2, 7)
