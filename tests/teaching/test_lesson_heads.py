"""Module 09's own computations, each against a second way to get it."""

import math
from dataclasses import replace

import pytest
import torch
from matplotlib.figure import Figure

from course_lib import GQA, MLA, Config, ModernDecoder, next_token_loss
from course_lib.teaching.lessons import heads as lesson
from course_lib.teaching.lessons.heads_figures import draw_sketch, head_graph, sketch_svg
from course_lib.teaching.wrong import TiledHeads, with_mistakes
from course_lib.zoo.configs import count_published, published

SIZES = dict(vocab_size=50, d_model=24, n_layers=3, n_heads=6, n_kv_heads=6, d_head=4,
             n_experts=0, first_k_dense=0)  # fmt: skip


def small(**more) -> ModernDecoder:
    torch.manual_seed(0)
    return ModernDecoder(Config(**SIZES | more), init=None)


def test_heads_are_read_in_place_and_tiled():
    assert lesson.read_by(6, 2) == [0, 0, 0, 1, 1, 1]
    assert lesson.read_by(6, 2, tiled=True) == [0, 1, 0, 1, 0, 1]
    kv_heads = torch.arange(2.0).view(1, 2, 1, 1)
    assert lesson.tile_heads(kv_heads, 6).flatten().tolist() == [0, 1, 0, 1, 0, 1]
    with pytest.raises(ValueError, match=r"K=4 does not divide H=6.*\[1, 2, 3, 6\]"):
        lesson.group_of(6, 4)


def test_devices_share_out_the_heads_and_repeat_what_is_too_few():
    assert lesson.heads_by_device(4, 2, 2) == [([0, 1], [0]), ([2, 3], [1])]
    assert [needed for _, needed in lesson.heads_by_device(4, 2, 4)] == [[0], [0], [1], [1]]
    with pytest.raises(ValueError, match="devices=3"):
        lesson.heads_by_device(4, 2, 3)


def test_weights_read_run_from_active_to_total():
    mixture, dense = published("DeepSeek-V3"), published("Llama-3-8B")
    assert lesson.weights_read(mixture, 1) == pytest.approx(mixture.active)
    assert lesson.weights_read(mixture, 10**5) == pytest.approx(mixture.total)
    count = count_published(mixture)
    k, E = mixture.n_experts_active, mixture.n_experts
    met = count.total - count.routed * (1 - k / E) ** 32
    assert lesson.weights_read(mixture, 32) == pytest.approx(met / 1e9, rel=0.01)
    assert lesson.weights_read(dense, 1) == lesson.weights_read(dense, 99) == dense.total


def test_bounds_of_a_device():
    model, device = published("Llama-3-8B"), lesson.Device("test", 20e9, 1e9, 4e9)
    assert device.ridge == 4
    assert lesson.most_requests(model, device, cache=10**9, weight_bits=16) == 4
    assert lesson.most_requests(model, device, cache=10**9, weight_bits=64) is None
    bound = lesson.step_bound(model, device, caches=4 * 10**9, batch=2, weight_bits=8)
    assert bound == pytest.approx(2 / 12)
    roof = lesson.attainable(device, torch.tensor([1.0, 4.0, 100.0]))
    assert roof.tolist() == [1e9, 4e9, 4e9]


def test_variants_keep_layers_and_windows():
    model = published("Gemma-3-27B")
    as_mqa = lesson.as_variant(model, "MQA")
    assert [(x.n, x.values, x.window) for x in as_mqa.layers] == [(52, 256, 1024), (10, 256, None)]
    assert lesson.bytes_of(published("DeepSeek-V3"), "MHA", 1) == 61 * 2 * 128 * 128 * 2
    with pytest.raises(ValueError, match="heads of several widths"):
        lesson.as_variant(published("Gemma-4-31B"), "MQA")


def test_intensity_is_the_group_size_and_counts_both_uses_of_a_latent():
    for K in (1, 2, 8):
        assert lesson.intensity(Config(n_heads=8, n_kv_heads=K)) == 8 / K
    assert lesson.intensity(Config(n_heads=8, n_kv_heads=2), value_bytes=1, queries=3) == 24
    cfg = Config(n_heads=128, n_kv_heads=128, attention=MLA(512, 64, 128, 128))
    assert lesson.intensity(cfg) == pytest.approx(128 * (576 + 512) / 576)
    assert lesson.expansion_flops(cfg) == 2 * 512 * 128 * 256


def test_pooling_equal_heads_changes_nothing_and_others_much():
    model, ids = small(attention=GQA(qk_norm=True)), torch.randint(50, (2, 9))
    for block in model.blocks:
        for W in (block.attn.W_k, block.attn.W_v):
            heads = W.weight.data.unflatten(0, (2, 3, 4))
            W.weight.data = heads[:, :1].expand(-1, 3, -1, -1).flatten(0, 2).contiguous()
    with torch.no_grad():
        want = model(ids)[0]
        for how in ("mean", "first"):
            grouped = lesson.with_pooled_heads(model, 2, how)
            assert grouped.cfg.n_kv_heads == 2
            assert torch.allclose(grouped(ids)[0], want, atol=1e-5)
        assert not torch.allclose(lesson.with_pooled_heads(model, 1)(ids)[0], want, atol=1e-2)
    assert model.blocks[0].attn.H_kv == 6 and model.cfg == replace(grouped.cfg, n_kv_heads=6)


def test_pooled_is_the_mean_or_the_first_of_neighbours():
    W = torch.arange(4.0).view(4, 1)  # four heads of width 1
    assert lesson.pooled(W, 4, 2).flatten().tolist() == [0.5, 2.5]
    assert lesson.pooled(W, 4, 2, "first").flatten().tolist() == [0, 2]


def test_each_row_pools_as_a_model_of_its_own_does():
    model, ids = small(n_kv_heads=3, attention=GQA(qk_norm=False)), torch.randint(50, (1, 9))
    alone = [
        model,
        lesson.with_pooled_heads(model, 1, "mean"),
        lesson.with_pooled_heads(model, 1, "first"),
        with_mistakes(model, TiledHeads),
    ]
    with torch.no_grad():
        together = lesson.with_pools_by_row(model)(ids.expand(4, -1))[0]
        want = torch.cat([one(ids)[0] for one in alone])
    assert torch.allclose(together, want, atol=1e-5)
    assert torch.pdist(want.flatten(1)).min() > 0.1  # four different models
    with pytest.raises(ValueError, match="qk_norm=True.*with_pooled_heads"):
        lesson.with_pools_by_row(small(attention=GQA(qk_norm=True)))


def test_losses_by_layer_are_those_of_whole_passes():
    model, ids = small(), torch.randint(50, (1, 7))
    with torch.no_grad():
        want = [next_token_loss(lesson.with_pooled_heads(model, 1, layers=[i])(ids)[0], ids)
                for i in range(3)]  # fmt: skip
    got = lesson.losses_by_layer(model, ids, 1)
    assert got == pytest.approx([w.item() for w in want], abs=1e-5)
    assert len({round(x, 4) for x in got}) == 3


def test_agreement_is_one_with_oneself_and_none_with_other_tokens():
    weights = torch.tensor([[[1.0, 0], [0.5, 0.5]], [[1.0, 0], [0, 1.0]], [[0.0, 1], [1, 0]]])
    got = lesson.agreement(weights)
    assert torch.equal(got, got.T) and torch.equal(got.diagonal(), torch.ones(3))
    assert got[0, 1].item() == 0.75 and got[1, 2].item() == 0


@pytest.mark.parametrize(("H", "K"), [(4, 4), (8, 2), (128, 1)])
def test_a_head_graph_is_the_same_in_both_forms(H, K):
    sketch = head_graph(H, K)
    assert (len(sketch.lines), len(sketch.dots), len(sketch.boxes)) == (H, H, K)
    svg = sketch_svg(sketch)
    assert (svg.count("<line"), svg.count("<circle"), svg.count("<rect")) == (H, H, K)
    inside = all(0 <= x <= sketch.width for x, *_ in sketch.dots)
    assert inside and all(math.isfinite(v) for line in sketch.lines for v in line[:4])
    ax = Figure().subplots()
    draw_sketch(sketch, ax)
    assert len(ax.patches) == H + 2 * K
