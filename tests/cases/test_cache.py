"""Faults people hit with the KV cache: A21-A25, A28. Right values, and what each fault gives."""

import pytest
import torch

from course_lib import (
    GQA,
    Config,
    KVCache,
    ModernDecoder,
    RollingCache,
    apply_rope,
    generate,
    left_pad,
    new_caches,
)
from course_lib.model import AttentionCore, padded_causal_mask, positions_of
from tests.helpers import R, close, ids_of, jittered, numbers, small, table


def column(values) -> torch.Tensor:
    """Keys of one head and width 1 that carry their own position: (1, 1, T, 1)."""
    return torch.as_tensor(values, dtype=torch.float32).view(1, 1, -1, 1)


def last_output(x, positions, mask=None):
    """Attention with q = k = v = x, the toy of the cases, at the given positions."""
    core = AttentionCore(Config(n_heads=1, n_kv_heads=1, d_head=8), scale=8**-0.5)
    x = x.view(1, 1, -1, 8)
    turned = apply_rope(x, *table(8, positions))
    return core(turned, turned, x, mask)[0, 0, -1]


def test_a21_positions_of_a_left_padded_batch():
    real = torch.tensor([[0, 0, 1, 1, 1]])
    assert positions_of(real).tolist() == [[0, 0, 0, 1, 2]]
    alone = last_output(R((5, 8), 5), torch.arange(5))
    padded = torch.cat((R((3, 8), 9), R((5, 8), 5)))
    real = torch.tensor([[0] * 3 + [1] * 5])
    mask = padded_causal_mask(real, 8)
    close(last_output(padded, positions_of(real)[0], mask), alone, atol=1e-6)
    index = [*range(7), 4]  # padded index in prefill, row length in decode: wrong
    close((last_output(padded, index, mask) - alone).abs().max(), 0.073087, atol=1e-6)
    other = [0, 0, 0, 0, 1, 2, 3, 7]  # the other mix: wrong
    close((last_output(padded, other, mask) - alone).abs().max(), 0.079934, atol=1e-6)
    close(last_output(padded, torch.arange(8), mask), alone, atol=1e-6)  # invisible with RoPE


@pytest.mark.parametrize("n_experts", [0, 6])
def test_a21_each_row_equals_its_single_run(n_experts):
    model = jittered(small(n_experts=n_experts))
    rows = [[5, 9, 2, 30, 7, 1], [8, 3, 40], [11]]
    ids, real = left_pad(rows)
    logits, _ = model(ids, attention_mask=real)
    for i, row in enumerate(rows):
        close(logits[i, -len(row) :].detach(), model(torch.tensor([row]))[0][0].detach())


def test_a22_nothing_leaks_into_the_next_call():
    model = jittered(small())
    P, Q = [[3, 1, 4]], [[1, 5, 9, 2]]
    first = generate(model, P, 6, temperature=0)
    generate(model, Q, 6, temperature=0)
    assert torch.equal(generate(model, P, 6, temperature=0), first)
    assert torch.equal(generate(jittered(small()), P, 6, temperature=0), first)


def test_a23_writing_past_the_capacity():
    buffer = column(range(8))
    before = buffer.clone()
    buffer[:, :, 8:9] = column([9])  # torch says nothing
    assert torch.equal(buffer, before)
    with pytest.raises(RuntimeError):
        buffer[:, :, 8:10] = torch.zeros(1, 1, 2, 1)
    cache = KVCache(capacity=8)
    cache.update(column(range(7)), column(range(7)))
    for n in (2, 3):
        with pytest.raises(ValueError, match=f"capacity=8 tokens, of which 7 are taken: {n} more"):
            cache.update(column(range(n)), column(range(n)))
        assert cache.length == 7 and cache.held()[0].flatten().tolist() == list(range(7))
    cache.update(column([7]), column([7]))
    with pytest.raises(ValueError, match="capacity=8"):
        cache.update(column([8]), column([8]))
    assert cache.held()[0].flatten().tolist() == list(range(8))


def test_a23_no_layer_is_written_when_the_last_is_full():
    model = jittered(small())
    caches = new_caches(model, capacity=8)
    caches[-1].capacity = 7
    model(ids_of(model.cfg, 1, 6), caches)
    held = [[t.clone() for t in cache.held()] for cache in caches]
    with pytest.raises(ValueError, match="capacity=7"):
        model(ids_of(model.cfg, 1, 2), caches, 6)
    for cache, before in zip(caches, held, strict=True):
        assert cache.length == 6
        assert all(torch.equal(a, b) for a, b in zip(cache.held(), before, strict=True))


@pytest.mark.parametrize("make", [KVCache, lambda: RollingCache(4)], ids=["all", "rolling"])
def test_a24_beam_reorder(make):
    cache = make()
    k = numbers(10, 20, 30).view(3, 1, 1, 1)
    cache.update(k, -k)
    cache.real = torch.tensor([[True], [False], [True]])
    cache.reorder(torch.tensor([1, 0, 0]))
    assert [t.flatten().tolist() for t in cache.held()] == [[20, 10, 10], [-20, -10, -10]]
    assert cache.real.flatten().tolist() == [False, True, True]
    in_place, source = k.clone(), [1, 0, 0]
    for i, row in enumerate(source):  # reads rows already overwritten
        in_place[i] = in_place[row]
    assert in_place.flatten().tolist() == [20, 20, 20]
    scattered = torch.zeros_like(k)
    for i, row in enumerate(source):
        scattered[row] = k[i]
    assert scattered.flatten().tolist() == [30, 10, 0]


def test_a25_dtypes():
    model = jittered(small(), dtype=torch.bfloat16)
    caches = new_caches(model)
    logits, router_logits = model(ids_of(model.cfg, 1, 4), caches)
    assert {t.dtype for cache in caches for t in cache.held()} == {torch.bfloat16}
    assert logits.dtype == torch.bfloat16 and router_logits[0].dtype == torch.bfloat16
    assert torch.cat((torch.zeros(1), torch.zeros(1).bfloat16())).dtype == torch.float32  # silent
    with pytest.raises(ValueError, match="torch.float32.*but the cache holds.*torch.bfloat16"):
        caches[0].update(*(t[..., :1, :].float() for t in caches[0].held()))
    assert caches[0].length == 4


def test_a28_rotating_cache_and_multi_token_appends():
    cache = RollingCache(4)
    for first in (0, 2, 4, 6):
        cache.update(column([first, first + 1]), column([0, 0]))
    assert cache.held()[0].flatten().tolist() == [4, 5, 6, 7]  # not 3 to 7
    assert cache.length == 8
    cache = RollingCache(4)
    seen, _ = cache.update(column(range(5)), column(range(5)))
    assert seen.flatten().tolist() == [0, 1, 2, 3, 4]  # the first query still needs key 0
    assert cache.held()[0].flatten().tolist() == [1, 2, 3, 4]


def test_a28_a_window_model_decodes_through_rolling_caches():
    model = ModernDecoder(small(attention=GQA(window=4)))
    caches = new_caches(model)
    ids = ids_of(model.cfg, 1, 12)
    chunks = [model(ids[:, t : t + 2], caches, t)[0] for t in range(0, 12, 2)]
    close(torch.cat(chunks, dim=1).detach(), model(ids)[0].detach())
    assert {cache.held()[0].shape[-2] for cache in caches} == {4}
