"""Sizes that follow from others, and how a refusal is worded."""

import dataclasses

import pytest

from course_lib import GQA, MLA, NTK, ALiBi, Config, Interpolation, Rope, Router
from course_lib.model.checks import divisors, is_number, is_whole, require


def test_derived_sizes():
    assert Config().group_size == 4 and Config(n_kv_heads=8).group_size == 1
    assert [Config().is_moe(layer) for layer in range(4)] == [False, True, True, True]
    assert Config().n_moe_layers == 3 and Config(first_k_dense=4).n_moe_layers == 0
    assert Config(n_experts=0).n_moe_layers == 0


@pytest.mark.parametrize(
    ("change", "rotated"),
    [
        ({}, 32),
        (dict(position=Rope(fraction=0.25)), 8),
        (dict(position=Rope(fraction=0.25, proportional=True)), 32),
        (dict(attention=MLA(d_rope=6)), 6),
        (dict(position=ALiBi()), 0),
        (dict(position=ALiBi(), d_head=5), 0),
    ],
)
def test_channels_that_the_rotation_covers(change, rotated):
    assert Config(**change).d_rotated == rotated


def test_a_config_is_a_value():
    assert Config() == Config(attention=GQA(), router=Router()) and hash(Config()) == hash(Config())
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().d_model = 3
    assert dataclasses.replace(Config(), n_layers=2).n_layers == 2


def test_a_dense_config_does_not_ask_about_experts():
    assert Config(n_experts=0, n_experts_active=9).n_moe_layers == 0


def test_layers_without_rotation():
    rope = Rope(nope_every=4)
    assert [rope.rotates(layer) for layer in range(8)] == [True] * 3 + [False] + [True] * 3 + [
        False
    ]
    assert all(Rope().rotates(layer) for layer in range(8))
    assert not any(ALiBi().rotates(layer) for layer in range(8))


def test_which_routers_learn_with_one_expert():
    learns = {r.kind: r.has_task_gradient(1) for r in map(Router, ("softmax_all", "sigmoid"))}
    assert learns == {"softmax_all": True, "sigmoid": False}
    assert Router("sigmoid", normalize=False).has_task_gradient(1)
    assert all(Router(kind).has_task_gradient(2) for kind in ("softmax_selected", "sigmoid"))


def test_the_parts_of_the_checks():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert [is_whole(v, 1) for v in (1, 0, True, 1.0, "1", None)] == [True] + [False] * 5
    assert [is_number(v) for v in (1, -2.5, True, float("nan"), float("inf"), "1")] == [
        True,
        True,
        *[False] * 4,
    ]
    require(True, "never", "shown")
    with pytest.raises(ValueError, match=r"^x=3 is odd\. Use 4\.$"):
        require(False, "x=3 is odd.", "Use 4.")


def test_an_example_in_a_message_would_work():
    with pytest.raises(ValueError, match="for example d_ff=512"):
        Config(d_ff=0)
    for part in (NTK, Interpolation):
        with pytest.raises(ValueError, match="for example factor=4.0"):
            part(factor=0)
