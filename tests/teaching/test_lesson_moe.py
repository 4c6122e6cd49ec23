"""Module 12's own computations agree with the library, and with what they stand for."""

import math

import numpy as np
import pytest
import torch

from course_lib import Config, MoE, Router, SwiGLU, load_balancing_loss, route
from course_lib.model import ModernDecoder, expert_capacity, keep_within_capacity
from course_lib.model.moe import combine_loop
from course_lib.teaching.lessons import moe as lesson


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# loads


def test_choices_are_distinct_seeded_and_even_without_skew():
    chosen = lesson.draw_choices(4000, 8, 2, seed=3)
    assert chosen.shape == (4000, 2) and (chosen[:, 0] != chosen[:, 1]).all()
    assert torch.equal(chosen, lesson.draw_choices(4000, 8, 2, seed=3))
    load = lesson.load_of(chosen, 8)
    mean, deviation = lesson.spread_if_independent(4000, 8, 2)
    assert load.sum() == 8000 and (load - mean).abs().max() < 4 * deviation
    skewed = lesson.load_of(lesson.draw_choices(4000, 8, 2, skew=1, seed=3), 8)
    assert (skewed - mean).abs().max() > 10 * deviation


@pytest.mark.parametrize("factor", [1.0, 1.25, 2.0])
def test_dropped_share_is_what_the_library_drops(factor):
    chosen = lesson.draw_choices(96, 8, 2, skew=1)
    capacity = expert_capacity(96, 8, 2, factor)
    kept = keep_within_capacity(chosen, 8, capacity)
    share = lesson.dropped_share(lesson.load_of(chosen, 8), capacity)
    assert share == pytest.approx(1 - kept.float().mean().item()) and share > 0


def test_evenness_runs_from_one_expert_to_all_alike():
    assert lesson.evenness([5, 0, 0, 0]) == 0
    assert lesson.evenness([2, 2, 2, 2]) == pytest.approx(1)
    assert lesson.evenness([1, 1, 0, 0]) == pytest.approx(0.5)


# the toy


def by_autograd(x, y, gate, experts, bias, alpha):
    """The toy's step with the library's router and loss."""
    gate, experts = (torch.tensor(w, requires_grad=True) for w in (gate, experts))
    logits = torch.tensor(x) @ gate
    weights, chosen = route(logits, 2, Router("sigmoid"), torch.tensor(bias))
    ran = (torch.tensor(x) @ experts).unflatten(-1, (lesson.EXPERTS, -1))
    picked = ran.gather(1, chosen.unsqueeze(-1).expand(-1, -1, ran.shape[-1]))
    error = ((weights.unsqueeze(-1) * picked).sum(1) - torch.tensor(y)).square().mean()
    balance = load_balancing_loss(logits, chosen, lesson.EXPERTS, alpha)
    (error + balance).backward()
    return error.item(), balance.item(), lesson.load_of(chosen, lesson.EXPERTS), gate, experts


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_gradients_of_the_toy_are_those_of_autograd_and_the_library(alpha):
    x, y = (batch[0] for batch in lesson.toy_task(1, seed=4))
    draw = np.random.default_rng(5)
    gate = draw.standard_normal((lesson.D, lesson.EXPERTS)).astype(np.float32)
    experts = draw.standard_normal((lesson.D, lesson.EXPERTS * lesson.D)).astype(np.float32)
    bias = np.linspace(-0.3, 0.3, lesson.EXPERTS).astype(np.float32)
    error, balance, load, *grads = lesson.toy_gradients(x, y, gate, experts, bias, alpha)
    want_error, want_balance, want_load, *leaves = by_autograd(x, y, gate, experts, bias, alpha)
    assert error == pytest.approx(want_error, rel=1e-4)
    assert balance == pytest.approx(want_balance, rel=1e-4, abs=1e-7)
    assert load.round().tolist() == want_load.tolist()
    for ours, leaf in zip(grads, leaves, strict=True):
        assert np.allclose(ours, leaf.grad.numpy(), atol=1e-5)


def test_a_biased_start_persists_without_help_and_ends_with_it():
    alone, loss, bias = (
        lesson.evenness(lesson.toy_run(*helper, start=3.0)["loads"][-20:].sum(0))
        for helper in ((0.0, 0.0), (0.3, 0.0), (0.0, 0.01))
    )
    assert alone < 0.93 < 0.97 < min(loss, bias)


# mistakes


def test_wrong_sums_differ_from_the_loop_and_capacity_leaves_out_slots():
    torch.manual_seed(0)
    moe = MoE(Config(d_model=16, d_expert=8, n_experts=4))
    flat = normal(10, 16)
    weights, chosen = moe.route(moe.gate(flat))
    right = combine_loop(moe.experts, flat, weights, chosen)
    for wrong in (lesson.concatenated, lesson.overwritten):
        got = wrong(moe.experts, flat, weights, chosen)
        assert got.shape == right.shape and not torch.allclose(got, right, atol=1e-4)
    kept = torch.ones_like(chosen, dtype=torch.bool)
    full = lesson.within_capacity(moe.experts, flat, weights, chosen, kept)
    assert torch.allclose(full, right, atol=1e-6)
    kept[3, 0] = False
    less = lesson.within_capacity(moe.experts, flat, weights, chosen, kept)
    changed = (less - right).abs().amax(-1) > 1e-6
    assert changed.nonzero().flatten().tolist() == [3]


# a dense layer, cut


@pytest.fixture
def ffn():
    torch.manual_seed(1)
    return SwiGLU(12, 24)


def test_all_experts_together_are_the_dense_layer(ffn):
    x = normal(2, 5, 12)
    for choice in ("largest", "fixed", "random"):
        cut = lesson.TopKOfSwiGLU(ffn, 6, 6, choice)
        assert torch.allclose(cut(x), ffn(x), atol=1e-5)


def test_contributions_are_the_lengths_of_what_is_added(ffn):
    hidden = normal(7, 24, seed=2)
    pieces = [hidden[:, 4 * e : 4 * e + 4] @ ffn.w_down.weight[:, 4 * e : 4 * e + 4].T
              for e in range(6)]  # fmt: skip
    want = torch.stack(pieces, 1).norm(dim=-1)
    assert torch.allclose(lesson.contributions(ffn, hidden, 6), want, atol=1e-5)


def test_the_oracle_errs_least_and_k_experts_run(ffn):
    x = normal(200, 12, seed=3)
    error = {
        choice: (lesson.TopKOfSwiGLU(ffn, 6, 2, choice)(x) - ffn(x)).norm().item()
        for choice in ("largest", "fixed", "random")
    }
    assert error["largest"] < error["fixed"] and error["largest"] < error["random"]
    lengths = normal(9, 6).abs()
    assert (lesson.chosen_mask(lengths, 2, "largest").sum(-1) == 2).all()
    assert len(lesson.chosen_mask(lengths, 2, "fixed").unique(dim=0)) == 1
    assert len(lesson.chosen_mask(lengths, 2, "random").unique(dim=0)) > 1


def test_a_cut_model_is_whole_again_afterwards():
    torch.manual_seed(0)
    model = ModernDecoder(Config(n_experts=0, n_layers=2, d_model=32, d_ff=16, vocab_size=20))
    ids = torch.arange(6)[None]
    with torch.no_grad():
        before = model(ids)[0]
        with lesson.cut_into_experts(model, [0, 1], 8, 2):
            cut = model(ids)[0]
        assert not torch.allclose(cut, before, atol=1e-5)
        assert torch.equal(model(ids)[0], before)


def test_bad_input_is_refused_in_a_sentence(ffn):
    with pytest.raises(ValueError, match="k=9 exceeds E=8"):
        lesson.draw_choices(4, 8, 9)
    with pytest.raises(ValueError, match="E=5 does not divide the 24 hidden units"):
        lesson.TopKOfSwiGLU(ffn, 5, 1)(normal(1, 12))
    with pytest.raises(ValueError, match="choice='best' is unknown"):
        lesson.chosen_mask(normal(2, 4), 1, "best")
    assert math.isclose(lesson.spread_if_independent(64, 8, 2)[1], math.sqrt(12))
