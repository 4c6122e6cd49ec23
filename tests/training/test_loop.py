"""The objective and one step: what is measured, what moves, what does not."""

import math

import pytest
import torch
import torch.nn.functional as F

from course_lib import (
    StepReport,
    balance_loss,
    load_balancing_loss,
    losses,
    next_token_loss,
    training_step,
)
from tests.helpers import close, ids_of, jittered, small


def test_the_loss_is_the_mean_over_the_next_tokens():
    draw = torch.Generator().manual_seed(0)
    logits, ids = torch.randn(2, 5, 7, generator=draw), torch.randint(7, (2, 5), generator=draw)
    right = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    close(next_token_loss(logits, ids), right)
    partly = ids.clone()
    partly[0, 2:] = -100
    chosen = [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)]
    right = torch.stack([F.cross_entropy(logits[b, t], ids[b, t + 1]) for b, t in chosen]).mean()
    close(next_token_loss(logits, partly), right)
    other = partly.masked_fill(partly == -100, -1)
    close(next_token_loss(logits, other, ignore_index=-1), right)


def test_nothing_to_predict_costs_nothing():
    logits = torch.randn(1, 3, 7).requires_grad_()
    loss = next_token_loss(logits, torch.full((1, 3), -100))
    loss.backward()
    assert loss == 0 and torch.equal(logits.grad, torch.zeros_like(logits))


def test_a_step_reports_what_it_measured_before_it_moved():
    model = jittered(small())
    ids = ids_of(model.cfg, 2, 9)
    cross_entropy, aux = losses(model, ids)
    (cross_entropy + aux).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    before = [p.detach().clone() for p in model.parameters()]
    report = training_step(model, torch.optim.SGD(model.parameters(), lr=0.5), ids)
    norm = math.sqrt(sum(g.square().sum().item() for g in grads))
    assert isinstance(report, StepReport)
    assert report.cross_entropy == pytest.approx(cross_entropy.item())
    assert report.aux == pytest.approx(aux.item())
    assert report.grad_norm == pytest.approx(norm, rel=1e-5)
    for weight, was, grad in zip(model.parameters(), before, grads, strict=True):
        close(weight.detach(), was - 0.5 * grad)


def test_clipping_shortens_the_step_and_reports_the_length_before():
    moved = []
    for max_norm in (None, 0.01):
        model = jittered(small())
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        report = training_step(model, optimizer, ids_of(model.cfg, 2, 9), max_norm=max_norm)
        steps = [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]
        moved.append(math.sqrt(sum(s.square().sum().item() for s in steps)))
        assert report.grad_norm > 1
    assert moved[0] == pytest.approx(report.grad_norm, rel=1e-3)
    assert moved[1] == pytest.approx(0.01, rel=1e-2)


def test_old_gradients_do_not_add_up():
    model = jittered(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ids = ids_of(model.cfg, 2, 9)
    first, second = training_step(model, optimizer, ids), training_step(model, optimizer, ids)
    assert first == second


def test_alpha_weighs_the_balance_loss_and_dense_models_have_none():
    model = jittered(small())
    ids = ids_of(model.cfg, 2, 9)
    _, one = losses(model, ids, alpha=1.0)
    _, hundredth = losses(model, ids)
    close(one / 100, hundredth)
    assert losses(model, ids, alpha=0)[1] == 0
    _, router_logits = model(ids)
    assert balance_loss(model, router_logits) == balance_loss(model, router_logits, alpha=0.01)
    layer = router_logits[0], router_logits[0].topk(2).indices, 6
    assert load_balancing_loss(*layer) == load_balancing_loss(*layer, alpha=0.01)
    dense = jittered(small(n_experts=0))
    assert balance_loss(dense, []) == 0 and losses(dense, ids)[1] == 0


def test_padding_takes_no_part_in_the_balance():
    model = jittered(small())
    ids = ids_of(model.cfg, 2, 6)
    real = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    _, router_logits = model(ids, attention_mask=real)
    masked = balance_loss(model, router_logits, real=real)
    kept = [logits[real.flatten().bool()] for logits in router_logits]
    close(masked.detach(), balance_loss(model, kept).detach())
    assert abs(masked - balance_loss(model, router_logits)) > 1e-4
