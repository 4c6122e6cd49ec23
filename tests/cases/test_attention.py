"""Faults people hit with attention: A13-A18, A20. Right values, and what each fault gives."""

import math

import pytest
import torch
import torch.nn.functional as F

from course_lib import GQA, MLA, Config, MultiHeadLatentAttention, RollingCache, causal_mask
from course_lib.model import AttentionCore, padded_causal_mask
from course_lib.model.attention import softmax_of_allowed
from tests.helpers import R, close, differs, numbers

POWERS = numbers(1, 2, 4, 8, 16, 32)


def core_of(d=2, **attention):
    cfg = Config(n_heads=1, n_kv_heads=1, d_head=d + d % 2, attention=GQA(**attention))
    return AttentionCore(cfg, scale=1 / math.sqrt(d))


def uniform(core, T: int, S: int, mask=None):
    """Zero queries and keys: every visible key gets the same weight."""
    v = POWERS[:S].view(1, 1, S, 1)
    return core(torch.zeros(1, 1, T, 2), torch.zeros(1, 1, S, 2), v, mask).flatten()


FORMS = pytest.mark.parametrize("form", ["sdpa", "explicit"])


@FORMS
def test_a13_causal_flag_with_fewer_queries_than_keys(form):
    close(uniform(core_of(form=form), 2, 5), [3.75, 6.2])
    close(uniform(core_of(form=form), 1, 4), [3.75])
    q, k, v = torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 5, 2), POWERS[:5].view(1, 1, 5, 1)
    upper_left = F.scaled_dot_product_attention(q, k, v, is_causal=True).flatten()
    close(upper_left, [1, 1.5])


@FORMS
def test_a14_rows_that_may_attend_to_nothing(form):
    core, x = core_of(4, form=form), R((3, 4), 3).view(1, 1, 3, 4).requires_grad_()
    mask = padded_causal_mask(torch.tensor([[0, 1, 1]]), 3)
    out = x
    for _ in range(2):
        out = core(out, out, out, mask)
    out[..., 1:, :].square().sum().backward()
    assert torch.equal(out[0, 0, 0], torch.zeros(4))
    assert x.grad.isfinite().all()
    alone = x.detach()[..., 1:, :]
    for _ in range(2):
        alone = core(alone, alone, alone)
    close(out[..., 1:, :].detach(), alone, atol=1e-6)


def test_a14_the_naive_softmax_spreads_nan():
    x = R((3, 4), 3).requires_grad_()
    allowed = padded_causal_mask(torch.tensor([[0, 1, 1]]), 3)[0, 0]
    out, rows = x, []
    for _ in range(2):
        out = (out @ out.T / 2).masked_fill(~allowed, -torch.inf).softmax(-1) @ out
        rows.append(out.isnan().any(-1).tolist())
    assert rows == [[True, False, False], [True, True, True]]
    out[1:].sum().backward()
    assert x.grad.isnan().all()


@FORMS
def test_a15_polarity_of_boolean_masks(form):
    core, right = core_of(form=form), [1, 1.5, 7 / 3, 3.75]
    close(uniform(core, 4, 4), right)
    close(uniform(core, 4, 4, causal_mask(4)), right)
    close(uniform(core, 4, 4, ~causal_mask(4)), [14 / 3, 6, 8, 0])  # upper triangle: wrong
    close(uniform(core, 4, 4, causal_mask(4).float()), [2.923655, 2.710236, 2.952313, 3.75])


@FORMS
def test_a16_expansion_of_kv_heads(form):
    cfg = Config(n_heads=4, n_kv_heads=2, d_head=2, attention=GQA(form=form))
    v = numbers(10, 20).view(1, 2, 1, 1)
    got = AttentionCore(cfg, 1.0)(torch.ones(1, 4, 1, 2), torch.ones(1, 2, 1, 2), v).flatten()
    assert got.tolist() == [10, 10, 20, 20]
    assert v.repeat(1, 2, 1, 1).flatten().tolist() == [10, 20, 10, 20]  # tiled: wrong
    with pytest.raises(ValueError, match="n_heads=5 is not a multiple of n_kv_heads=3"):
        Config(n_heads=5, n_kv_heads=3)


@FORMS
def test_a17_sliding_window_width(form):
    right = [1, 1.5, 7 / 3, 14 / 3, 28 / 3, 56 / 3]
    core = core_of(window=3, form=form)
    close(uniform(core, 6, 6), right)
    assert causal_mask(6, window=3).sum(1).tolist() == [1, 2, 3, 3, 3, 3]
    four = uniform(core_of(window=4, form=form), 6, 6)  # not counting the current token
    close(four[3], 3.75)
    differs(four, right)
    cache, rows = RollingCache(3), []
    for t in range(6):
        k, v = cache.update(torch.zeros(1, 1, 1, 2), POWERS[t].view(1, 1, 1, 1))
        rows.append(core(torch.zeros(1, 1, 1, 2), k, v).item())
    close(rows, right)


def test_a18_attention_sinks():
    scores, v = numbers(0, 1, 2).view(1, 1, 1, 3), numbers(1, 2, 3)
    weights = softmax_of_allowed(scores, sink=numbers(1)).flatten()
    close(weights, [0.072329, 0.196612, 0.534447], atol=1e-6)
    close(weights.sum(), 0.803388, atol=1e-6)
    close(weights @ v, 2.068893, atol=1e-6)
    plain = softmax_of_allowed(scores).flatten()
    sigmoid_form = plain * torch.sigmoid(scores.logsumexp(-1) - 1).flatten()
    close(sigmoid_form, weights, atol=1e-7)
    close(plain @ v, 2.575210, atol=1e-6)  # without sink
    close(weights / weights.sum() @ v, 2.575210, atol=1e-6)  # renormalised


def mla_of_the_case(form):
    part = MLA(kv_lora_rank=3, d_rope=2, d_nope=4, d_value=4, form=form)
    mla = MultiHeadLatentAttention(Config(n_heads=2, attention=part))
    with torch.no_grad():
        mla.W_uk.weight.copy_(R((2, 4, 3), 2).view(8, 3))
        mla.W_uv.weight.copy_(R((2, 4, 3), 13).view(8, 3))
    return mla


@torch.no_grad()
def test_a20_mla_scale_and_absorption():
    q_nope, q_rope = R((2, 3, 4), 3).unsqueeze(0), R((2, 3, 2), 5).unsqueeze(0)
    k_rope, latent = R((3, 2), 7).unsqueeze(0), R((3, 3), 11).unsqueeze(0)
    naive, absorbed = mla_of_the_case("naive"), mla_of_the_case("absorbed")
    right = naive.naive(q_nope, q_rope, latent, k_rope, None)
    close(right[0, 0, -1], [1.034752, 0.352124, -0.276887, 0.135319])
    close(absorbed.absorbed(q_nope, q_rope, latent, k_rope, None), right, atol=1e-6)
    absorbed.core.scale = 1 / math.sqrt(3 + 2)  # from latent + rope: wrong
    wrong = absorbed.absorbed(q_nope, q_rope, latent, k_rope, None)
    close(wrong[0, 0, -1], [1.036943, 0.347334, -0.277882, 0.135283])
    differs(wrong, right)
    close(wrong[0, :, 0], right[0, :, 0], atol=1e-6)  # one key never shows it
