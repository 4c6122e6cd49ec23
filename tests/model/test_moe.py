"""Routing in groups, and experts that take any share of the tokens."""

import pytest
import torch

from course_lib import MoE, Router, route
from course_lib.model.moe import close_groups
from tests.helpers import R, close, numbers, small

GROUPS = Router("sigmoid", n_groups=2, n_groups_active=1)


def test_only_the_best_group_is_open():
    # group 0 has the single best expert, group 1 the better pair
    logits = numbers([3, -9, 2, 1.9])
    weights, chosen = route(logits, 2, GROUPS)
    assert sorted(chosen[0].tolist()) == [2, 3]
    close(weights.sum(), 1)
    closed = close_groups(logits.sigmoid(), GROUPS)
    assert closed[0, :2].tolist() == [-torch.inf] * 2 and closed[0, 2:].isfinite().all()


def test_an_expert_of_a_closed_group_never_wins():
    bias = numbers(-3, -3, -2, -2)  # scores with bias are negative: 0 would win over them
    _, chosen = route(numbers([1, 1, 0, 0]), 2, GROUPS, bias)
    assert sorted(chosen[0].tolist()) == [2, 3]


def test_scaling_multiplies_every_weight():
    logits = R((5, 6), 3)
    plain, chosen = route(logits, 2, Router("sigmoid"))
    scaled, same = route(logits, 2, Router("sigmoid", scaling=2.5))
    assert torch.equal(chosen, same)
    close(scaled, 2.5 * plain)


@pytest.mark.parametrize("k", [1, 3, 6])
def test_a_token_runs_through_k_different_experts(k):
    weights, chosen = route(R((7, 6), 5), k, Router("softmax_all"))
    assert weights.shape == chosen.shape == (7, k)
    assert all(len(set(row)) == k for row in chosen.tolist())


def test_tokens_are_routed_alone():
    moe = MoE(small())
    x = R((2, 5, 24), 7)
    with torch.no_grad():
        whole, router_logits = moe(x)
        assert router_logits.shape == (10, 6)
        for b in range(2):
            for t in range(5):
                close(moe(x[b : b + 1, t : t + 1])[0], whole[b : b + 1, t : t + 1], 1e-6)


def test_the_selection_bias_is_a_buffer():
    moe = MoE(small(router=Router("sigmoid", selection_bias=True)))
    assert "selection_bias" in moe.state_dict()
    assert "selection_bias" not in dict(moe.named_parameters())
    assert "selection_bias" not in MoE(small()).state_dict()
