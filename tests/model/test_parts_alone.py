"""Norm, rotation, masks, feed-forward, Tap: each alone, against formulas and torch."""

import math

import pytest
import torch
import torch.nn.functional as F

from course_lib import NTK, Config, Interpolation, RMSNorm, Rope, SwiGLU, apply_rope, causal_mask
from course_lib.model import (
    RotaryTable,
    Tap,
    alibi_bias,
    document_mask,
    half_split_order,
    inverse_frequencies,
    merge_heads,
    padded_causal_mask,
    positions_of,
    scaled_frequencies,
    split_heads,
)
from course_lib.model.attention import AttentionCore, softmax_of_allowed
from course_lib.model.masks import additive, narrow
from tests.helpers import R, close, numbers, table


def test_rms_norm_equals_torch_and_its_gradient():
    norm = RMSNorm(8, eps=1e-3)
    with torch.no_grad():
        norm.weight.copy_(R((8,), 3) + 2)
    x = R((2, 3, 8), 5).requires_grad_()
    other = x.detach().clone().requires_grad_()
    ours, torchs = norm(x), F.rms_norm(other, (8,), norm.weight, eps=1e-3)
    close(ours.detach(), torchs.detach(), 1e-6)
    ours.square().sum().backward(), torchs.square().sum().backward()
    close(x.grad, other.grad)
    assert repr(norm) == "RMSNorm(8, eps=0.001)"


def test_swiglu_is_gate_times_up():
    ffn = SwiGLU(2, 1)
    with torch.no_grad():
        ffn.w_gate.weight.copy_(numbers([1, 0]))
        ffn.w_up.weight.copy_(numbers([0, 1]))
        ffn.w_down.weight.copy_(numbers([2], [3]))
        got = ffn(numbers(1.5, 4))
    silu = 1.5 / (1 + math.exp(-1.5))
    close(got, [2 * silu * 4, 3 * silu * 4])
    assert all(linear.bias is None for linear in (ffn.w_gate, ffn.w_up, ffn.w_down))


def test_frequencies_fall_from_1_by_powers_of_theta():
    close(inverse_frequencies(6, 1000.0), [1, 0.1, 0.01], atol=1e-12)
    ntk = scaled_frequencies(Rope(scaling=NTK(8.0)), 6, 1000.0)
    assert ntk[0] == 1 and ntk[-1].item() == pytest.approx(0.01 / 8)
    halved = scaled_frequencies(Rope(scaling=Interpolation(2.0)), 6, 1000.0)
    close(halved, [0.5, 0.05, 0.005], atol=1e-12)
    cut = scaled_frequencies(Rope(fraction=0.34, proportional=True), 6, 1000.0)
    close(cut, [1, 0, 0], atol=1e-12)


def test_the_table_has_one_row_a_position_of_any_shape():
    cfg = Config(d_head=8, rope_theta=100.0)
    cos, sin = RotaryTable(cfg)(torch.tensor([[[0, 3]], [[5, 1]]]))
    assert cos.shape == sin.shape == (2, 1, 2, 4) and cos.dtype == torch.float32
    close(cos[1, 0, 0], [math.cos(5 * 100 ** (-i / 4)) for i in range(4)], 1e-6)
    close(sin[0, 0, 1], [math.sin(3 * 100 ** (-i / 4)) for i in range(4)], 1e-6)
    assert list(RotaryTable(cfg).state_dict()) == [], "nothing to cast, nothing to save"


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_rotation_adds_angles_and_keeps_lengths(pairing):
    x = R((1, 3, 8), 3)
    once = apply_rope(x, *table(8, [4, 5, 6]), pairing)
    twice = apply_rope(once, *table(8, [2, 2, 2]), pairing)
    close(twice, apply_rope(x, *table(8, [6, 7, 8]), pairing))
    close(once.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(apply_rope(x, *table(8, [0, 0, 0]), pairing), x)
    assert apply_rope(x.bfloat16(), *table(8, [4, 5, 6]), pairing).dtype == torch.bfloat16


def test_half_split_on_permuted_channels_is_interleaved():
    x, order = R((3, 8), 7), half_split_order(8)
    assert order.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    mixed = apply_rope(x, *table(8, [4, 5, 6]), "interleaved")
    close(apply_rope(x[:, order], *table(8, [4, 5, 6])), mixed[:, order], 1e-6)


def test_masks_say_true_where_a_query_may_look():
    assert causal_mask(3).tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert causal_mask(2, 4).tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert causal_mask(2, 4, window=2).tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    real = torch.tensor([[0, 1, 1]])
    assert padded_causal_mask(real, 2).tolist() == [[[[0, 1, 0], [0, 1, 1]]]]
    assert padded_causal_mask(real, 3)[0, 0, 0].tolist() == [0, 0, 0]
    assert positions_of(torch.tensor([[1, 1, 0, 1]])).tolist() == [[0, 1, 1, 2]]
    documents = document_mask(torch.tensor([[0, 0, 1]]))
    assert documents.tolist() == [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]
    assert narrow(None, 2, 4, None) is None
    assert narrow(causal_mask(2, 6), 2, 4, 2).tolist() == causal_mask(2, 4, 2).tolist()


def test_alibi_slopes_and_distances():
    bias = alibi_bias(8, 2, 3)
    assert bias.shape == (8, 2, 3)
    assert bias[0].tolist() == [[-0.5, 0.0, -math.inf], [-1.0, -0.5, 0.0]]
    close(bias[:, 1, 0], [-2 * 2.0**-h for h in range(1, 9)])


def test_an_additive_mask():
    assert additive(torch.tensor([True, False])).tolist() == [0, -math.inf]
    bias = numbers(1, 2)
    assert additive(bias) is bias


def test_softmax_of_nothing_is_nothing():
    scores = numbers([0, 0, -math.inf], [-math.inf] * 3).view(1, 1, 2, 3).requires_grad_()
    weights = softmax_of_allowed(scores)
    assert weights.tolist() == [[[[0.5, 0.5, 0], [0, 0, 0]]]]
    weights.square().sum().backward()
    assert scores.grad.isfinite().all()
    sunk = softmax_of_allowed(scores.detach(), sink=numbers(0))
    close(sunk, [[[[1 / 3, 1 / 3, 0], [0, 0, 0]]]])


def test_heads_lie_side_by_side_in_a_token():
    x = torch.arange(12).view(1, 2, 6)
    heads = split_heads(x, 3)
    assert heads.tolist() == [[[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]]
    assert torch.equal(merge_heads(heads), x)


def test_attention_shows_what_it_is():
    core = AttentionCore(Config(), scale=0.5)
    assert repr(core).splitlines()[1].strip() == "scale=0.5, window=None, form='sdpa'"
    tap = Tap("B T D")
    x = torch.ones(1)
    assert tap(x) is x and repr(tap) == "Tap(B T D)" and not list(tap.parameters())
