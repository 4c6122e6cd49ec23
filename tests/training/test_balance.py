"""The selection bias moves against the load, by gamma, and touches nothing else."""

import pytest
import torch

from course_lib import Config, Router
from course_lib.model import MoE
from course_lib.training.balance import update_selection_bias

CHOSEN = torch.tensor([[0, 1], [0, 2], [0, 1]])  # loads 3, 2, 1, 0: mean 1.5


def layer(**router) -> MoE:
    torch.manual_seed(0)
    cfg = Config(d_model=8, d_expert=4, n_experts=4, router=Router("sigmoid", **router))
    return MoE(cfg)


def test_each_bias_moves_by_gamma_towards_the_mean_load():
    moe = layer(selection_bias=True)
    bias = update_selection_bias(moe, CHOSEN, gamma=0.25)
    assert bias.tolist() == [-0.25, -0.25, 0.25, 0.25]
    assert update_selection_bias(moe, CHOSEN, gamma=0.25).tolist() == [-0.5, -0.5, 0.5, 0.5]


def test_an_even_load_moves_nothing_and_expert_without_tokens_is_counted():
    moe = layer(selection_bias=True)
    assert not update_selection_bias(moe, torch.tensor([[0, 1], [2, 3]])).any()
    assert update_selection_bias(moe, torch.tensor([[0, 1], [1, 0]]), 1.0).tolist() == [
        -1,
        -1,
        1,
        1,
    ]


def test_weights_of_the_experts_stay_without_the_bias():
    """The mutant that weights by the biased scores fails here."""
    moe, logits = layer(selection_bias=True), torch.tensor([[1.0, 0, -1, 2]])
    weights, chosen = moe.route(logits)
    assert chosen.tolist() == [[3, 0]]
    moe.selection_bias[0] += 0.3  # the ranking swaps, the pair stays
    again, swapped = moe.route(logits)
    assert swapped.tolist() == [[0, 3]]
    assert again.tolist() == weights.flip(-1).tolist()


def test_repeated_it_evens_out_a_router_that_prefers_one_expert():
    moe = layer(selection_bias=True)
    logits = torch.randn(512, 4, generator=torch.Generator().manual_seed(0)) * 0.5
    logits[:, 0] += 3
    before = moe.route(logits)[1].flatten().bincount(minlength=4)
    for _ in range(200):
        update_selection_bias(moe, moe.route(logits)[1], gamma=0.01)
    after = moe.route(logits)[1].flatten().bincount(minlength=4)
    assert before.max() == 512 and after.max() < 1.1 * after.float().mean()


def test_no_gradient_reaches_the_bias_and_it_is_saved():
    moe = layer(selection_bias=True)
    update_selection_bias(moe, CHOSEN)
    assert "selection_bias" in moe.state_dict() and not moe.selection_bias.requires_grad


def test_bad_input_is_refused_with_a_way_out():
    with pytest.raises(ValueError, match="selection_bias=True"):
        update_selection_bias(layer(), CHOSEN)
    for gamma in (0, -1.0, float("nan"), True):
        with pytest.raises(ValueError, match=f"gamma={gamma!r} is no step"):
            update_selection_bias(layer(selection_bias=True), CHOSEN, gamma)
