"""The cache contract, held for both kinds: length, room, trim, dtype, growth."""

import pytest
import torch

from course_lib import GQA, MLA, KVCache, RollingCache, new_caches
from course_lib.zoo.counts import cache_bytes
from tests.helpers import ids_of, jittered, small

KINDS = {"growing": KVCache, "fixed": lambda: KVCache(40), "rolling": lambda: RollingCache(40)}
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def tokens(first: int, n: int) -> torch.Tensor:
    """(2, 3, n, 4), every entry its own."""
    return torch.arange(first, first + n).view(1, 1, n, 1) + torch.arange(24).view(2, 3, 1, 4) / 100


@kinds
def test_update_returns_all_so_far(make):
    cache, total = make(), 0
    for n in (3, 1, 20, 1):
        k, v = cache.update(tokens(total, n), -tokens(total, n))
        total += n
        assert cache.length == total and k.shape == (2, 3, total, 4)
        assert torch.equal(k, tokens(0, total)) and torch.equal(v, -k)
    assert cache.batch_size == 2
    assert cache.nbytes == 2 * k.numel() * 4


@kinds
def test_trim_forgets_the_last(make):
    cache = make()
    cache.update(tokens(0, 6), tokens(0, 6))
    cache.real = torch.ones(2, 6, dtype=torch.bool)
    cache.trim(2)
    assert cache.length == 4 and cache.real.shape == (2, 4)
    k, _ = cache.update(tokens(9, 1), tokens(9, 1))
    assert torch.equal(k, torch.cat((tokens(0, 4), tokens(9, 1)), dim=2))
    cache.trim(5)
    assert cache.length == 0 and cache.nbytes == 0


@kinds
def test_an_empty_cache_knows_no_batch(make):
    cache = make()
    assert (cache.length, cache.batch_size, cache.nbytes) == (0, None, 0)
    with pytest.raises(ValueError, match="rows="):
        cache.reorder(torch.tensor([0]))


@kinds
def test_what_is_stored_carries_no_gradient(make):
    k, _ = make().update(tokens(0, 2).requires_grad_(), tokens(0, 2))
    assert not k.requires_grad


def test_a_fixed_cache_is_allocated_once():
    cache = KVCache(10)
    k, _ = cache.update(tokens(0, 1), tokens(0, 1))
    place = k.data_ptr()
    for t in range(1, 10):
        k, _ = cache.update(tokens(t, 1), tokens(t, 1))
        assert k.data_ptr() == place


def test_a_growing_cache_doubles():
    cache, sizes = KVCache(), set()
    for t in range(70):
        cache.update(tokens(t, 1), tokens(t, 1))
        sizes.add(cache.buffers[0].shape[-2])
    assert sizes == {16, 32, 64, 128}


def test_a_rolling_cache_stops_growing():
    cache = RollingCache(4)
    for t in range(9):
        cache.update(tokens(t, 1), tokens(t, 1))
    assert cache.nbytes == 2 * 4 * 24 * 4 and cache.length == 9
    assert torch.equal(cache.held()[0], tokens(5, 4))


def test_each_layer_gets_the_cache_that_its_attention_needs():
    kinds = {
        type(cache)
        for attention in (GQA(), GQA(window=3), MLA(16, 4, 8, 6))
        for cache in new_caches(jittered(small(attention=attention)), 9)
    }
    assert kinds == {KVCache, RollingCache}
    assert [c.capacity for c in new_caches(jittered(small()), 9)] == [9] * 3


@pytest.mark.parametrize("attention", [GQA(), GQA(window=3), MLA(16, 4, 8, 6)])
def test_live_bytes_equal_the_count_from_the_config(attention):
    model = jittered(small(attention=attention))
    caches = new_caches(model)
    for t in (0, 5):
        model(ids_of(model.cfg, 2, 5), caches, t)
        measured = sum(cache.nbytes for cache in caches)
        assert measured == cache_bytes(model.cfg, t + 5, 2, torch.float32)


def test_mla_leaves_one_latent_and_one_key_for_all_heads():
    attn = jittered(small(attention=MLA(16, 4, 8, 6))).blocks[0].attn
    assert attn.cache_spec() == {"latent": (16,), "k_rope": (4,)}
    assert jittered(small()).blocks[0].attn.cache_spec() == {"k": (2, 8), "v": (2, 8)}
