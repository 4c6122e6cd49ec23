"""Counts from a Config alone, equal to the built model for every variant."""

import pytest
import torch

from course_lib import GQA, MLA, Config, ModernDecoder
from course_lib.trace import trace
from course_lib.zoo.counts import (
    ParameterCount,
    cache_bytes,
    cache_values,
    count_parameters,
    forward_flops,
    numel,
)
from tests.helpers import VARIANTS, ids_of, jittered, small


@pytest.mark.parametrize("variant", VARIANTS)
def test_counted_parameters_are_the_built_ones(variant):
    cfg = small(**VARIANTS[variant])
    count = count_parameters(cfg)
    model = ModernDecoder(cfg)
    assert count.total == numel(model)
    routed = [ffn.experts for ffn in (b.ffn for b in model.blocks if b.is_moe)]
    assert count.routed == sum(map(numel, routed))
    if cfg.n_experts:
        assert count.total - count.active == count.routed // 6 * (6 - cfg.n_experts_active)
    else:
        assert count.active == count.total and count.router == 0


@pytest.mark.parametrize(
    "variant", [name for name in VARIANTS if "window" not in name and "Interpolation" != name]
)
def test_counted_flops_are_the_recorded_ones(variant):
    cfg = small(**VARIANTS[variant])
    recorded = sum(stage.flops for stage in trace(jittered(cfg), ids_of(cfg, 1, 7)))
    assert recorded == forward_flops(cfg, 7)


def test_flops_of_a_step_with_a_cache():
    cfg = Config()
    assert forward_flops(cfg, 1, 9) - forward_flops(cfg, 1, 8) == 2 * 8 * (32 + 32) * 4


def test_the_roles_add_up():
    count = ParameterCount(1, 2, 3, 4, 5, 60, 7, 8, 20)
    assert count.total == 90 and count.active == 50


def test_cache_of_one_token_and_of_a_window():
    assert cache_values(Config()) == 2 * 2 * 32
    assert cache_values(Config(attention=MLA(512, 64))) == 576
    window = Config(attention=GQA(window=16))
    assert cache_bytes(window, 10**6) == cache_bytes(Config(), 16)
    assert cache_bytes(Config(), 10, batch=3, dtype=torch.float32) == 3 * 10 * 4 * 128 * 4
