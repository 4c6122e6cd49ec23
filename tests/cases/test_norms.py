"""Faults people hit with norms: A09-A12. Right values, and the value that each fault gives."""

import torch

from course_lib import Config, GroupedQueryAttention, RMSNorm, apply_rope
from tests.helpers import close, differs, numbers, table


def normed(x, eps, gain=None):
    norm = RMSNorm(x.shape[-1], eps)
    if gain is not None:
        norm.weight = torch.nn.Parameter(gain)
    with torch.no_grad():
        return norm(x)


def test_a09_place_of_epsilon():
    x = numbers(1e-3, -1e-3, 2e-3, 0)
    right = [0.294884, -0.294884, 0.589768, 0]
    close(normed(x, 1e-5), right, atol=1e-6)
    outside = x / (x.pow(2).mean().sqrt() + 1e-5)
    close(outside, [0.809884, -0.809884, 1.619768, 0], atol=1e-4)
    summed = x / (x.pow(2).sum() + 1e-5).sqrt()
    close(summed, [0.25, -0.25, 0.5, 0], atol=1e-6)
    differs(outside, right), differs(summed, right)
    assert torch.equal(normed(torch.zeros(2, 4), 1e-5), torch.zeros(2, 4))


def test_a10_fp16_overflow():
    x = numbers(300, -300, 150, 0).half()
    naive = x * torch.rsqrt(x.pow(2).mean() + 1e-5)
    assert torch.equal(naive, torch.zeros(4, dtype=torch.float16))
    right = normed(x, 1e-5)
    assert right.dtype == torch.float16
    close(right, [1.333008, -1.333008, 0.666504, 0], atol=1e-3)


def test_a11_gain_before_or_after_the_cast():
    x = numbers(1, -3, 2, 5).bfloat16()
    gain = numbers(1.75, 0.875, 1.375, 0.625)
    multiply_first = [0.55859375, -0.83984375, 0.87890625, 1.0]  # the documented one
    for weight in (gain, gain.bfloat16()):
        got = normed(x, 1e-6, weight)
        assert got.dtype == torch.bfloat16 and got.tolist() == multiply_first
    x32 = x.float()
    cast_first = (x32 * torch.rsqrt(x32.pow(2).mean() + 1e-6)).bfloat16() * gain.bfloat16()
    assert cast_first.tolist() == [0.5625, -0.83984375, 0.8828125, 1.0]
    assert (x * gain).dtype == torch.float32  # the silent upcast


def rotated_query(gain):
    """What attention makes of the query [1, 2, 3, 4] at position 3, by its own Tap."""
    attn = GroupedQueryAttention(Config(d_model=4, n_heads=1, n_kv_heads=1, d_head=4))
    seen = []
    attn.see_q_rotated.register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.no_grad():
        attn.W_q.weight.copy_(torch.eye(4))
        attn.q_norm.weight.copy_(gain)
        attn(numbers(1, 2, 3, 4).view(1, 1, 4), *table(4, [3]))
    return seen[0].flatten()


def test_a12_qk_norm_and_rope_order():
    x, uneven, even = numbers(1, 2, 3, 4).view(1, 4), numbers(1, 2, 3, 4), numbers(1, 2, 1, 2)
    cos, sin = table(4, [3])
    right = [-0.825262, 1.284691, -3.201917, 5.883556]
    close(rotated_query(uneven), right)
    swapped = normed(apply_rope(x, cos, sin), 1e-6, uneven)[0]
    close(swapped, [-0.516083, 1.372314, -3.098858, 5.927367])
    differs(swapped, right)
    close(normed(apply_rope(x, cos, sin), 1e-6, even)[0], rotated_query(even))  # nobody can see
