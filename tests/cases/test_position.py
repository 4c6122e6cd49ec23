"""Faults people hit with RoPE: A01-A08. Right values, and the value that each fault gives."""

import math

import pytest
import torch

from course_lib import Config, Llama3, ModernDecoder, Rope, YaRN, apply_rope
from course_lib.model import inverse_frequencies, scaled_frequencies
from course_lib.model.attention import softmax_of_allowed
from course_lib.model.rope import yarn_ramp
from tests.helpers import R, close, differs, numbers, small, table

EIGHT = numbers(1, 2, 3, 4, 5, 6, 7, 8)


def at(position: int, x=EIGHT, pairing="half", **rope):
    return apply_rope(x.unsqueeze(0), *table(x.numel(), [position], **rope), pairing)[0]


def test_a01_pairing_convention():
    half = [-1.695593, 0.137552, 2.788682, 3.975982, -4.808842, 6.323059, 7.086837, 8.011964]
    mixed = [-1.272233, -1.838865, 1.683929, 4.707907, 4.817777, 6.147278, 6.975969, 8.020964]
    close(at(3), half)
    close(at(3, pairing="interleaved"), mixed)
    differs(half, mixed)
    for pairing in ("half", "interleaved"):
        close(at(3, pairing=pairing).norm(), 14.282857)


def weights_of_last_query(query_position: int, shift: int = 0):
    q, k = R((6, 8), 3)[5:], R((6, 8), 5)
    q = apply_rope(q, *table(8, [query_position + shift]))
    k = apply_rope(k, *table(8, torch.arange(6) + shift))
    return softmax_of_allowed((q @ k.T / math.sqrt(8)).view(1, 1, 1, 6)).flatten()


def test_a02_position_offset_in_decode():
    right = [0.139832, 0.233573, 0.183958, 0.122151, 0.144951, 0.175535]
    at_zero = [0.147934, 0.228076, 0.184855, 0.111209, 0.124465, 0.203461]
    one_too_far = [0.140073, 0.232338, 0.190144, 0.111331, 0.139438, 0.186677]
    close(weights_of_last_query(5), right, atol=1e-6)
    close(weights_of_last_query(0), at_zero, atol=1e-6)
    close(weights_of_last_query(6), one_too_far, atol=1e-6)
    close(weights_of_last_query(5, shift=7), weights_of_last_query(5), atol=1e-6)


def test_a03_low_precision_angle_table():
    positions = torch.arange(2048)
    freq = inverse_frequencies(32, 10000.0)
    exact = (positions.double().unsqueeze(-1) * freq).cos()
    rounded = (positions.bfloat16().unsqueeze(-1) * freq.bfloat16()).cos()  # the wrong way
    gap = (rounded.double() - exact).abs()
    close(gap.max(), 1.9968, atol=1e-3)
    close((gap > 0.1).double().mean(), 0.229, atol=1e-3)
    assert positions.bfloat16().unique().numel() == 641
    for dtype in (torch.float32, torch.bfloat16):
        model = ModernDecoder(small(d_head=32, n_layers=1, max_seq_len=2048)).to(dtype)
        cos, _ = model.rope(positions)
        close(cos, exact, atol=1e-4)
        close(cos.bfloat16(), exact, atol=0.003)


def test_a04_partial_rotary():
    right = [3.160435, 1.797584, -0.107938, 4.094959, 5, 6, 7, 8]
    close(at(5, fraction=0.5), right)
    close(at(5, fraction=0.5, proportional=True)[[2, 3, 6, 7]], [3, 4, 7, 8])  # slow pairs
    freq_from_d = inverse_frequencies(8, 10000.0)[:2].float()
    wrong = apply_rope(
        EIGHT.unsqueeze(0), (5 * freq_from_d).cos()[None], (5 * freq_from_d).sin()[None]
    )
    close(wrong[0], [3.160435, -0.162537, -0.107938, 4.469181, 5, 6, 7, 8])
    differs(right, wrong)
    # pairing i with i + D/2, frequencies from r
    cos, sin = table(4, [5])
    padded = [
        torch.cat((t, fill), dim=-1)
        for t, fill in ((cos, torch.ones(1, 2)), (sin, torch.zeros(1, 2)))
    ]
    across = apply_rope(EIGHT.unsqueeze(0), *padded)[0]
    close(across, [5.078284, 1.697626, 3, 4, 0.459387, 6.09246, 7, 8])
    differs(right, across)


def test_a05_llama3_frequency_scaling():
    plain = inverse_frequencies(64, 500000.0)
    scaled = scaled_frequencies(Rope(scaling=Llama3(32, 1, 4, 8192)), 64, 500000.0)
    close(scaled[:15], plain[:15], atol=0)
    close(scaled[18:], plain[18:] / 32, atol=1e-15)
    mixed = torch.tensor([0.00129054793, 0.000429556797, 9.7082878e-05], dtype=torch.float64)
    torch.testing.assert_close(scaled[15:18], mixed, rtol=1e-6, atol=0)
    assert scaled.sum().item() == pytest.approx(2.9682023, rel=1e-6)
    # unscaled, and mixed linearly in the wavelength instead of length / wavelength
    assert plain[15].item() == pytest.approx(0.00213111954, rel=1e-6)
    wavelength = 2 * math.pi / plain[15].item()
    kept = (8192 - wavelength) / (8192 - 8192 / 4)
    wrong = plain[15].item() * kept + plain[15].item() / 32 * (1 - kept)
    assert wrong == pytest.approx(0.00182859763, rel=1e-6)


def test_a06_yarn():
    yarn = YaRN(factor=4, original_length=2048, beta_fast=32, beta_slow=1)
    open_ended = YaRN(factor=4, original_length=2048, truncate=False)
    assert yarn_ramp(64, 10000.0, yarn) == (8, 21)
    assert yarn_ramp(64, 10000.0, open_ended) == pytest.approx((8.064001, 20.105201), abs=1e-6)

    def pair_14(scaling):
        return scaled_frequencies(Rope(scaling=scaling), 64, 10000.0)[14].item()

    assert pair_14(yarn) == pytest.approx(0.0116272115, rel=1e-7)
    assert pair_14(open_ended) == pytest.approx(0.011207952, rel=1e-7)
    assert pair_14(None) == pytest.approx(0.0177827941, rel=1e-7)
    assert yarn.magnitude == pytest.approx(1.138629436, abs=1e-9)
    assert yarn.magnitude**2 == pytest.approx(1.296477, abs=1e-6)
    assert YaRN(attention_factor=1.0).magnitude == 1.0
    for scaling, length in ((yarn, yarn.magnitude), (YaRN(attention_factor=1.0), 1.0)):
        cos, sin = table(64, [3], scaling=scaling)
        close((cos**2 + sin**2).sqrt(), torch.full((1, 32), length))


def test_a07_table_shorter_than_the_sequence():
    cos, sin = table(8, torch.arange(16))
    assert (torch.ones(1, 0, 8) * cos[16:17].repeat(1, 2)).shape == (1, 0, 8)  # no error in torch
    with pytest.raises(ValueError, match="cos has 0 rows for 1 tokens"):
        apply_rope(torch.ones(1, 1, 8), cos[16:17], sin[16:17])
    with pytest.raises(ValueError, match="cos has 1 rows for 3 tokens"):
        apply_rope(torch.ones(1, 3, 8), cos[15:18], sin[15:18])
    model = ModernDecoder(small(max_seq_len=16))
    with pytest.raises(ValueError, match="reach position 17, but max_seq_len=16"):
        model(torch.zeros(1, 3, dtype=torch.long), pos_offset=15)
    assert model(torch.zeros(1, 1, dtype=torch.long), pos_offset=15)[0].shape == (1, 1, 41)


def test_a08_odd_head_size():
    with pytest.raises(ValueError, match="d_head=5"):
        Config(d_head=5)
    with pytest.raises(ValueError, match=r"d_head=8 with fraction=0\.375: .* 3 channels"):
        Config(d_head=8, position=Rope(fraction=3 / 8))
    with pytest.raises(ValueError, match="d=5"):
        inverse_frequencies(5, 10000.0)
