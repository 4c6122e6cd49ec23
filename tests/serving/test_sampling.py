"""From logits to a token: filters, the distribution drawn from, seeds."""

import math

import pytest
import torch

from course_lib import next_token_probabilities, sample
from course_lib.serving.sampling import check_sampling, keep_min_p, keep_top_k, keep_top_p
from tests.helpers import close, numbers

LOGITS = numbers(0.5, 0.3, 0.15, 0.05).log()


def kept(logits):
    return logits.isfinite().nonzero().flatten().tolist()


def test_temperature_sharpens_and_flattens():
    close(next_token_probabilities(LOGITS), [0.5, 0.3, 0.15, 0.05])
    squared = numbers(0.25, 0.09, 0.0225, 0.0025)
    close(next_token_probabilities(LOGITS, 0.5), squared / squared.sum())
    close(next_token_probabilities(LOGITS, 1e6), [0.25] * 4, atol=1e-4)
    assert next_token_probabilities(LOGITS, 0).tolist() == [1, 0, 0, 0]


def test_filters_keep_the_likeliest():
    assert kept(keep_top_k(LOGITS, 2)) == [0, 1] and kept(keep_top_k(LOGITS, 9)) == [0, 1, 2, 3]
    assert len(kept(keep_top_k(torch.zeros(5), 3))) == 3, "exactly k among equals"
    assert kept(keep_top_p(LOGITS, 0.6)) == [0, 1] and kept(keep_top_p(LOGITS, 1e-9)) == [0]
    assert kept(keep_top_p(LOGITS[[3, 1, 0, 2]], 0.6)) == [1, 2], "order does not matter"
    assert kept(keep_min_p(LOGITS, 0.29)) == [0, 1, 2] and kept(keep_min_p(LOGITS, 0)) == [
        0,
        1,
        2,
        3,
    ]
    rows = torch.stack((LOGITS, LOGITS.flip(0)))
    assert keep_top_p(rows, 0.6).isfinite().tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]


def test_filters_follow_each_other():
    after_k = next_token_probabilities(LOGITS, top_k=2)
    close(after_k, [0.625, 0.375, 0, 0])
    # 0.625 of the two that are left already reaches 0.6
    close(next_token_probabilities(LOGITS, top_k=2, top_p=0.6), [1, 0, 0, 0])
    close(next_token_probabilities(LOGITS, top_k=3, min_p=0.4), [0.625, 0.375, 0, 0])


def test_an_excluded_logit_stays_excluded():
    banned = LOGITS.clone()
    banned[0] = -math.inf
    close(next_token_probabilities(banned, 0.7)[0], 0)
    assert sample(banned.unsqueeze(0), temperature=0).item() == 1


def test_draws_follow_the_distribution_and_the_seed():
    rows = LOGITS.repeat(20000, 1)
    draws = [sample(rows, 1.0, torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    shares = draws[0].bincount(minlength=4) / 20000
    close(shares, [0.5, 0.3, 0.15, 0.05], atol=0.015)
    assert set(sample(rows, 1.0, top_k=2).tolist()) == {0, 1}


def test_bfloat16_logits_are_sampled_in_float32():
    assert next_token_probabilities(LOGITS.bfloat16()).dtype == torch.float32


def test_every_argument_is_checked_without_a_model():
    check_sampling(1.0, 1, 1.0, 0.0)
    for bad in (dict(top_k=True), dict(top_p=math.nan), dict(min_p="0")):
        with pytest.raises(ValueError, match=next(iter(bad))):
            check_sampling(1.0, **bad)
