"""Faults people hit with experts: A29-A38. Right values, and the value that each fault gives."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from course_lib import Config, MoE, Router, balance_loss, load_balancing_loss, route
from course_lib.model import expert_capacity, keep_within_capacity
from course_lib.model.moe import combine_loop, combine_sorted
from tests.helpers import close, differs, numbers

COMBINE = pytest.mark.parametrize("combine", [combine_loop, combine_sorted])


def routed(logits, k, *router, **options):
    bias = options.pop("bias", None)
    weights, chosen = route(numbers(*logits).unsqueeze(0), k, Router(*router, **options), bias)
    return weights[0], chosen[0].tolist()


def test_a29_softmax_and_top_k():
    logits = (1, 2, 3, 4)
    for kind, right in {
        "softmax_all": [0.643914, 0.236883],
        "softmax_selected": [0.731059, 0.268941],
        "softmax_renormalized": [0.731059, 0.268941],
    }.items():
        weights, chosen = routed(logits, 2, kind)
        assert chosen == [3, 2]
        close(weights, right, atol=1e-6)
    close(routed(logits, 2, "softmax_all")[0].sum(), 0.880797, atol=1e-6)
    twice = routed(logits, 2, "softmax_all")[0].softmax(-1)  # softmax of the softmaxed: wrong
    close(twice, [0.600376, 0.399624], atol=1e-6)


LOGITS = numbers([2, 1, 0, 0], [2, 0, 1, 0], [2, 0, 0, 1], [0, 2, 1, 0])
EVEN = numbers([3, 2, 0, 0], [0, 3, 2, 0], [0, 0, 3, 2], [2, 0, 0, 3])


def balance(logits, k, **how):
    return load_balancing_loss(logits, logits.topk(k, dim=-1).indices, logits.shape[1], 1.0, **how)


def test_a30_load_balancing_loss():
    logits = LOGITS.clone().requires_grad_()
    loss = balance(logits, 1)
    loss.backward()
    close(loss.detach(), 1.685111)
    close(logits.grad[0], [0.144121, -0.059238, -0.042441, -0.042441], atol=1e-6)
    close(balance(LOGITS, 2), 2.360296)
    close(balance(LOGITS, 2, divide_by_k=True), 1.180148)
    close(balance(EVEN, 2), 2.0)
    close(balance(EVEN, 2, divide_by_k=True), 1.0)
    chosen = LOGITS.topk(2, dim=-1).indices  # P over the selected only: wrong
    hard = torch.zeros(4, 4).scatter(1, chosen, 1.0)
    P = (LOGITS.softmax(-1) * hard).mean(0)
    close(4 * (hard.mean(0) * P).sum(), 2.071215)


def test_a31_per_layer_then_combined():
    first, second = numbers([9, 0], [9, 0]), numbers([0, 9], [0, 9])
    moe = SimpleNamespace(route=lambda logits: route(logits, 1), experts=[0, 1])
    block = SimpleNamespace(is_moe=True, ffn=moe)
    model = SimpleNamespace(blocks=[SimpleNamespace(is_moe=False), block, block])
    close(balance(first, 1), 1.999753)
    close(balance_loss(model, [first, second], alpha=1.0), 3.999506)  # the library sums
    close(balance(torch.cat((first, second)), 1), 1.0)  # joined: the collapse cancels


def test_a32_padding_in_the_loss():
    logits = 4 * torch.eye(3)[[0, 1, 2, 0, 0, 0]]
    close(balance(logits, 1, real=torch.tensor([1, 1, 1, 0, 0, 0])), 1.0)
    close(balance(logits, 1), 1.473497)  # counted: wrong


def test_a33_top_1_with_renormalised_weight():
    logits = numbers([1, 2, 0.5]).requires_grad_()
    weights, chosen = route(logits, 1, Router("softmax_all"))
    (3 * weights.sum()).backward()
    assert chosen.item() == 1
    close(weights.item(), 0.628532, atol=1e-6)
    close(logits.grad[0], [-0.435995, 0.700439, -0.264444], atol=1e-6)
    for router in (Router(), Router("softmax_renormalized"), Router("sigmoid")):
        logits = numbers([1, 2, 0.5]).requires_grad_()
        (3 * route(logits, 1, router)[0].sum()).backward()
        close(logits.grad, torch.zeros(1, 3), atol=1e-6)  # learns nothing: the Config refuses it
        with pytest.raises(ValueError, match="n_experts_active=1 with router kind="):
            Config(n_experts_active=1, router=router)
    for router in (Router("softmax_all"), Router("sigmoid", normalize=False)):
        assert Config(n_experts_active=1, router=router).n_experts_active == 1


@COMBINE
def test_a34_adding_through_repeated_indices(combine):
    plain = torch.zeros(3)
    plain[torch.tensor([0, 0, 1])] += numbers(1, 2, 3)
    assert plain.tolist() == [2, 3, 0]  # one of two writes is lost
    experts = nn.ModuleList([nn.Identity(), nn.Identity(), nn.Identity()])
    chosen = torch.tensor([[0, 1], [2, 0], [1, 2]])
    weights = numbers([1, 2], [3, 4], [5, 6])
    got = combine(experts, torch.ones(3, 1), weights, chosen)
    assert got.flatten().tolist() == [3, 7, 11]


@pytest.mark.parametrize("form", ["loop", "sorted"])
def test_a35_an_expert_without_tokens(form):
    moe = MoE(
        Config(d_model=4, n_experts=3, d_expert=2, n_experts_active=2, router=Router(form=form))
    )
    with torch.no_grad():
        moe.gate.weight.copy_(numbers([9] * 4, [-9] * 4, [5] * 4))
    out, router_logits = moe(torch.ones(1, 5, 4))
    loss = out.square().sum() + load_balancing_loss(router_logits, moe.route(router_logits)[1], 3)
    loss.backward()
    assert loss.isfinite()
    for weight in moe.experts[1].parameters():
        assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert moe.experts[0].w_up.weight.grad.any()
    assert torch.zeros(0, 4).mean().isnan()  # what a mean over no tokens gives


def test_a36_bias_corrected_sigmoid_routing():
    logits, bias = (1, 0, -1, 2), numbers(0, 0, 0.9, 0)
    weights, chosen = routed(logits, 2, "sigmoid", selection_bias=True, bias=bias)
    right = dict(zip(chosen, weights.tolist(), strict=True))
    assert sorted(right) == [2, 3]
    close([right[2], right[3]], [0.233915, 0.766085], atol=1e-6)
    biased = (numbers(*logits).sigmoid() + bias)[[2, 3]]
    close(biased / biased.sum(), [0.570288, 0.429712], atol=1e-6)  # weights from biased scores
    assert sorted(routed(logits, 2, "sigmoid")[1]) == [0, 3]  # bias ignored
    close(routed((-200, -200, -300, -300), 2, "sigmoid")[0], [0, 0])  # never 0 / 0


def test_a37_ties():
    weights, chosen = routed((3, 5, 5, 5, 1), 2)
    assert len(set(chosen)) == 2 and set(chosen) < {1, 2, 3}
    close(weights, [0.5, 0.5])
    assert (numbers(3, 5, 5, 5, 1) >= 5).sum() == 3  # a threshold keeps too many
    assert len(set(routed((0,) * 6, 2)[1])) == 2


def test_a38_capacity():
    assert expert_capacity(4, 4, 2, 4) == 4  # not 8: there are 4 tokens
    assert expert_capacity(7, 8, 2, 1) == 2  # truncated it would be 1
    assert expert_capacity(100, 11, 1, 1.1) == 10  # 10.000000000000002 in floating point
    chosen = torch.zeros(4, 1, dtype=torch.long)
    padding_first = torch.tensor([False, False, True, True])
    kept = keep_within_capacity(chosen, 4, 2, padding_first).flatten()
    assert kept.nonzero().flatten().tolist() == [2, 3]
    assert keep_within_capacity(chosen, 4, 2).flatten().nonzero().flatten().tolist() == [0, 1]
    differs(kept.float(), keep_within_capacity(chosen, 4, 2).flatten().float())
    two_each = torch.tensor([[0, 1], [0, 2], [0, 1], [1, 2]])
    assert keep_within_capacity(two_each, 3, 2).tolist() == [[1, 1], [1, 1], [0, 1], [0, 1]]
