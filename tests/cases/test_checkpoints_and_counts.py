"""Faults people hit with checkpoints and counting: A56, A57, A71-A73."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from course_lib import GQA, Config, ModernDecoder, new_caches
from course_lib.zoo.checkpoints import build_decoder, load, save
from course_lib.zoo.counts import cache_bytes, count_parameters, forward_flops, numel
from tests.helpers import close, ids_of, jittered, small


def test_a56_tied_weights_in_safetensors(tmp_path):
    from safetensors.torch import load_file, save_file

    model, path = jittered(small()), tmp_path / "tied.safetensors"
    with pytest.raises(RuntimeError, match="share memory"):
        save_file(model.state_dict(), path)
    save(model, path)
    assert "lm_head.weight" not in load_file(path)
    again = load(path)
    ids = ids_of(model.cfg, 2, 5)
    close(again(ids)[0].detach(), model(ids)[0].detach(), atol=1e-6)
    for (name, ours), theirs in zip(
        model.state_dict().items(), again.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert again.lm_head.weight is again.embed.weight and numel(again) == numel(model)
    with pytest.raises(RuntimeError, match="Missing key.*lm_head.weight"):
        ModernDecoder(small(tied=False)).load_state_dict(load_file(path))
    with pytest.raises(ValueError, match=r"1 missing \['lm_head.weight'\]"):
        build_decoder(small(tied=False), load_file(path))


def test_a56_an_untied_head_is_not_swallowed_by_a_tied_model():
    weights = jittered(small(tied=False)).state_dict()
    model = jittered(small(), seed=1)
    before = model.embed.weight.clone()
    with pytest.raises(ValueError, match="tied=True, but lm_head.weight differs"):
        model.load_state_dict(weights)
    assert torch.equal(model.embed.weight, before)


@pytest.mark.parametrize("prefix", ["model.", "_orig_mod."])
def test_a57_keys_that_match_nothing(prefix):
    model = jittered(small())
    weights = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    other = jittered(small(), seed=1)
    before = other.norm_f.weight.clone()
    other.load_state_dict(weights, strict=False)
    assert torch.equal(other.norm_f.weight, before)  # torch: nothing loaded, nothing said
    with pytest.raises(ValueError, match=f"All begin with '{prefix}': cut it off"):
        build_decoder(model.cfg, weights)


CASE = dict(
    vocab_size=100,
    d_model=16,
    n_layers=2,
    n_heads=4,
    d_head=4,
    d_ff=32,
    d_expert=32,
    attention=GQA(qk_norm=False),
)


def test_a71_moe_parameters():
    cfg = Config(**CASE, n_kv_heads=2, n_experts=4, n_experts_active=2, first_k_dense=0)
    count = count_parameters(cfg)
    assert (count.total, count.active) == (18704, 12560)
    assert count.total * 2 // 4 == 9352  # total k / E: wrong
    assert numel(ModernDecoder(cfg)) == 18704
    mixtral = Config(
        vocab_size=32000,
        d_model=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        d_head=128,
        n_experts=8,
        n_shared_experts=0,
        d_expert=14336,
        first_k_dense=0,
        tied=False,
        attention=GQA(qk_norm=False),
    )
    count = count_parameters(mixtral)
    assert (count.total, count.active) == (46_702_792_704, 12_879_925_248)


def test_a72_flops():
    cfg = Config(**CASE, n_kv_heads=4, n_experts=0)
    assert forward_flops(cfg, 8) == 8 * 14464
    assert 14464 + 2 * 100 * 16 == 17664  # the embedding counted: wrong
    explicit = Config(
        **CASE | dict(attention=GQA(False, form="explicit")), n_kv_heads=4, n_experts=0
    )
    with FlopCounterMode(display=False) as counter:
        ModernDecoder(explicit)(ids_of(explicit, 1, 8))
    assert counter.get_total_flops() == 8 * 14464


def test_a73_kv_cache_bytes():
    cfg = Config(n_layers=32, n_heads=32, n_kv_heads=8, d_head=128)
    assert cache_bytes(cfg, 1) == 131072
    assert cache_bytes(cfg, 8192) == 2**30
    heads = Config(n_layers=32, n_heads=32, n_kv_heads=32, d_head=128)
    assert cache_bytes(heads, 8192) == 4 * 2**30  # query heads: wrong
    for dtype, batch in ((torch.float32, 1), (torch.bfloat16, 3)):
        model = jittered(small(), dtype=dtype)
        caches = new_caches(model)
        model(ids_of(model.cfg, batch, 7), caches)
        measured = sum(cache.nbytes for cache in caches)
        assert measured == cache_bytes(model.cfg, 7, batch, dtype) > 0
