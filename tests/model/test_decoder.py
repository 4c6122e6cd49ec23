"""The whole decoder against an independent one, and what its state dict and ties promise."""

import copy
import math

import pytest
import torch

from course_lib import (
    GQA,
    Block,
    Config,
    ModernDecoder,
    RollingCache,
    generate,
    left_pad,
    new_caches,
)
from course_lib.model import init_weights
from tests import oracle
from tests.helpers import chunked, close, ids_of, jittered, small


@pytest.mark.parametrize(
    "change",
    [
        {},
        dict(n_experts=0),
        dict(first_k_dense=0, n_shared_experts=2),
        dict(n_kv_heads=1),
        dict(tied=False),
        dict(norm_eps=0.1),
        dict(rope_theta=50.0),
    ],
)
def test_logits_equal_an_independent_decoder(change):
    cfg = small(n_layers=2, d_model=12, **change)
    model = jittered(cfg)
    ids = ids_of(cfg, 1, 6)
    right = oracle.logits(model.state_dict(), cfg, ids[0].tolist())
    assert right.std() > 0.3, "too quiet to tell mistakes apart"
    with torch.no_grad():
        close(model(ids)[0][0], right)
        close(chunked(model, ids, [2, 3, 1])[0], right)


def test_state_dict_names_are_the_ones_the_course_uses():
    names = list(ModernDecoder(small(n_layers=2)).state_dict())
    block = "blocks.1."
    experts = [
        f"{block}ffn.experts.{e}.{w}.weight" for e in range(6) for w in ("w_gate", "w_up", "w_down")
    ]
    shared = [f"{block}ffn.shared.0.{w}.weight" for w in ("w_gate", "w_up", "w_down")]
    attention = [f"attn.{w}.weight" for w in ("W_q", "W_k", "W_v", "W_o", "q_norm", "k_norm")]
    assert names[:1] + names[-2:] == ["embed.weight", "norm_f.weight", "lm_head.weight"]
    assert [name for name in names if name.startswith(block)] == [
        f"{block}norm1.weight",
        *(block + name for name in attention),
        f"{block}norm2.weight",
        f"{block}ffn.gate.weight",
        *experts,
        *shared,
    ]


def test_init_draws_every_matrix_small_and_leaves_gains_at_1():
    torch.manual_seed(0)
    model = ModernDecoder(Config(n_layers=2))
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:
            assert weight.std().item() == pytest.approx(0.02, rel=0.05), name
            assert abs(weight.mean().item()) < 1e-3, name
    again = ModernDecoder(Config(n_layers=2), init=None).apply(init_weights)
    assert again.embed.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_a_block_adds_to_the_stream_and_never_normalises_it():
    block = Block(small(n_experts=0))
    x = torch.randn(1, 5, 24)
    with torch.no_grad():
        block.attn.W_o.weight.zero_(), block.ffn.w_down.weight.zero_()
        cos, sin = ModernDecoder(small()).rope(torch.arange(5))
        out, router_logits = block(x, cos, sin)
    assert torch.equal(out, x) and router_logits is None


def test_router_logits_come_one_a_moe_layer():
    model = jittered(small())
    logits, router_logits = model(ids_of(model.cfg, 2, 5))
    assert logits.shape == (2, 5, 41)
    assert [tuple(r.shape) for r in router_logits] == [(10, 6)] * 2
    assert jittered(small(n_experts=0))(ids_of(model.cfg, 2, 5))[1] == []


def test_the_tie_survives_every_way_of_moving_a_model():
    model = jittered(small())
    moves = [lambda m: m.double(), lambda m: m.bfloat16(), lambda m: m.to("meta"), copy.deepcopy]
    for move in moves:
        moved = move(jittered(small()))
        assert moved.lm_head.weight is moved.embed.weight
    assert len(list(model.parameters())) == len(model.state_dict()) - 1


def test_an_offset_without_caches_shifts_the_positions():
    model = jittered(small())
    ids, real = left_pad([[3, 4, 5, 6], [7, 8]])
    for how in ({}, dict(attention_mask=real)):
        close(model(ids, pos_offset=30, **how)[0].detach(), model(ids, **how)[0].detach(), 1e-4)
    model(ids, pos_offset=36)
    for how in ({}, dict(attention_mask=real)):
        with pytest.raises(ValueError, match="max_seq_len=40"):
            model(ids, pos_offset=37, **how)


def test_right_padding_changes_no_real_token():
    model = jittered(small())
    ids = torch.tensor([[3, 4, 5, 0, 0]])
    real = torch.tensor([[1, 1, 1, 0, 0]])
    logits = model(ids, attention_mask=real)[0]
    close(logits[:, :3].detach(), model(ids[:, :3])[0].detach())
    assert logits.isfinite().all()


def test_the_caches_remember_the_padding():
    model = jittered(small())
    ids, real = left_pad([[3, 4, 5, 6], [7, 8]])
    caches = new_caches(model)
    model(ids, caches, 0, real)
    step = model(torch.tensor([[9], [9]]), caches, 4)[0]
    alone = model(torch.tensor([[7, 8, 9]]))[0]
    close(step[1].detach(), alone[0, -1:].detach())
    assert caches[0].real.tolist() == [[True] * 5, [False, False, True, True, True]]


def test_a_cache_can_be_trimmed_and_run_again():
    for attention in (GQA(), GQA(window=9)):
        model = jittered(small(attention=attention))
        ids, caches = ids_of(model.cfg, 1, 8), new_caches(model)
        right = model(ids, caches)[0].detach()
        for cache in caches:
            cache.trim(3)
        close(model(ids[:, 5:], caches, 5)[0].detach(), right[:, 5:])


def test_a_cache_that_forgets_too_much_is_refused():
    model = jittered(small(attention=GQA(window=5)))
    ids = ids_of(model.cfg, 1, 6)
    wide = [RollingCache(7) for _ in model.blocks]
    close(chunked(model, ids, [1] * 6, caches=wide), model(ids)[0].detach())
    with pytest.raises(ValueError, match="keep the last 4 tokens, but attention has window=5"):
        model(ids, [RollingCache(4) for _ in model.blocks])
    with pytest.raises(ValueError, match="window=None"):
        jittered(small())(ids, [RollingCache(4) for _ in model.blocks])


def test_training_lowers_the_loss_to_the_entropy_of_a_simple_text():
    from course_lib import training_step

    torch.manual_seed(0)
    model = ModernDecoder(small(n_layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(20).repeat(2, 1)  # after the first token nothing is uncertain
    report = [training_step(model, optimizer, ids, max_norm=1.0) for _ in range(50)]
    assert report[0].cross_entropy == pytest.approx(math.log(41), abs=0.3)
    assert report[-1].cross_entropy < 0.1
    assert generate(model, [[0, 1, 2]], 5, temperature=0)[0].tolist() == list(range(8))
