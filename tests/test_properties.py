"""What must hold for every variant of the decoder, on weights of which none is neutral."""

import copy
import functools
import pickle
import random
from dataclasses import replace

import pytest
import torch

from course_lib import GQA, MLA, ALiBi, ModernDecoder, generate, left_pad, losses, new_caches
from course_lib.trace import trace
from tests.helpers import VARIANTS, chunked, close, ids_of, jittered, small

variants = pytest.mark.parametrize("variant", VARIANTS)


@functools.cache
def decoder(variant: str):
    """One model a variant for all tests; none of them changes its weights."""
    return jittered(small(**VARIANTS[variant]))


def whole(model, ids, **how):
    with torch.no_grad():
        return model(ids, **how)[0]


def same_weights(model, **parts):
    """The same weights in a decoder of another form."""
    other = ModernDecoder(replace(model.cfg, **parts), init=None).eval()
    other.load_state_dict(model.state_dict())
    return other


@variants
def test_no_logit_depends_on_a_later_token(variant):
    model = decoder(variant)
    ids = ids_of(model.cfg, 2, 9)
    before = whole(model, ids)
    for t in (1, 4, 8):
        changed = ids.clone()
        changed[:, t] = (ids[:, t] + 7) % model.cfg.vocab_size
        after = whole(model, changed)
        close(after[:, :t], before[:, :t])
        assert (after[:, t] - before[:, t]).abs().max() > 1e-3, "the token itself has no effect"


@variants
@pytest.mark.parametrize("rows", [1, 2])
def test_cached_equals_uncached_at_every_position(variant, rows):
    model = decoder(variant)
    ids = ids_of(model.cfg, rows, 10)
    right = whole(model, ids)
    draw = random.Random(variant)
    for _ in range(2):
        cuts = sorted(draw.sample(range(1, 10), 3))
        split = [b - a for a, b in zip([0, *cuts], [*cuts, 10], strict=True)]
        close(chunked(model, ids, split), right)
    close(chunked(model, ids, [1] * 10), right)


@variants
def test_a_left_padded_row_equals_its_single_run(variant):
    model = decoder(variant)
    rows = [ids_of(model.cfg, n, seed=n).tolist() for n in (8, 5, 1)]
    ids, real = left_pad(rows)
    logits = whole(model, ids, attention_mask=real)
    in_chunks = chunked(model, ids, [3, 4, 1], real)
    for i, row in enumerate(rows):
        single = whole(model, torch.tensor([row]))[0]
        close(logits[i, -len(row) :], single)
        close(in_chunks[i, -len(row) :], single)
    assert logits.isfinite().all()


@variants
def test_greedy_text_is_the_same_with_and_without_cache_and_padding(variant):
    model = decoder(variant)
    rows = [ids_of(model.cfg, n, seed=n).tolist() for n in (5, 3, 1)]
    cached = generate(model, rows, 6, temperature=0)
    assert torch.equal(cached, generate(model, rows, 6, temperature=0, use_cache=False))
    assert torch.equal(cached, generate(model, rows, 6, temperature=0, engine="readable"))
    for row, padded in zip(rows, cached, strict=True):
        single = generate(model, [row], 6, temperature=0)[0]
        assert padded.tolist()[-len(single) :] == single.tolist()


@variants
def test_every_weight_learns_and_every_gradient_is_finite(variant):
    model = jittered(small(**VARIANTS[variant]))
    cross_entropy, aux = losses(model, ids_of(model.cfg, 16, 16))
    (cross_entropy + aux).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all(), name
    silent = [name for name, p in model.named_parameters() if not p.grad.any()]
    # softmax ignores what it adds to all scores alike, as with a single key each
    alone = variant == "window of one"
    of_scores = ("W_q", "W_k", "q_norm", "k_norm")
    assert [n for n in silent if not (alone and any(s in n for s in of_scores))] == []


@variants
def test_copies_keep_the_tie_and_the_logits(variant):
    model = decoder(variant)
    ids = ids_of(model.cfg, 1, 5)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(whole(twin, ids), whole(model, ids))
        assert (twin.lm_head.weight is twin.embed.weight) == model.cfg.tied
        assert twin.embed.weight is not model.embed.weight


@variants
def test_bfloat16_runs_from_end_to_end(variant):
    model = jittered(small(**VARIANTS[variant]), dtype=torch.bfloat16)
    caches = new_caches(model)
    logits, _ = model(ids_of(model.cfg, 2, 5), caches)
    assert logits.dtype == torch.bfloat16 and logits.isfinite().all()
    assert {t.dtype for t in caches[0].held()} == {torch.bfloat16}
    assert generate(model, [[1, 2], [3]], 3, seed=0).shape == (2, 5)
    trace(model, ids_of(model.cfg, 2, 5))  # holds the explicit form against the fused one


@variants
def test_the_meta_device_builds_it_without_memory(variant):
    cfg = small(**VARIANTS[variant])
    with torch.device("meta"):
        empty = ModernDecoder(cfg, init=None).state_dict()
    real = ModernDecoder(cfg).state_dict()
    assert [(n, t.shape) for n, t in empty.items()] == [(n, t.shape) for n, t in real.items()]
    assert all(t.is_meta for t in empty.values())


@variants
def test_a_trace_gives_each_axis_letter_one_size(variant):
    model = decoder(variant)
    sizes = {}
    for stage in trace(model, ids_of(model.cfg, 2, 5), flops=False):
        assert len(stage.axes.split()) == len(stage.shape), stage
        for letter, size in zip(stage.axes.split(), stage.shape, strict=True):
            assert sizes.setdefault(letter, size) == size, stage
    assert sizes["T"] == sizes["S"] == 5 and sizes["B"] == 2 and sizes["H"] == 4


def shifted_gap(variant: str, by: int) -> float:
    model = decoder(variant)
    ids = ids_of(model.cfg, 2, 9)
    return (whole(model, ids, pos_offset=by) - whole(model, ids)).abs().max().item()


@variants
def test_only_distances_between_positions_count(variant):
    assert shifted_gap(variant, 17) < 2e-4


GQA_VARIANTS = [
    name
    for name, changes in VARIANTS.items()
    if isinstance(changes.get("attention", GQA()), GQA) and "explicit" not in name
]


@pytest.mark.parametrize("variant", GQA_VARIANTS)
def test_explicit_scores_equal_the_fused_kernel(variant):
    model = decoder(variant)
    other = same_weights(model, attention=replace(model.cfg.attention, form="explicit"))
    ids, real = left_pad([list(range(7)), [4, 5, 6]])
    close(whole(other, ids), whole(model, ids))
    close(whole(other, ids, attention_mask=real), whole(model, ids, attention_mask=real))
    close(chunked(other, ids, [2, 4, 1], real), chunked(model, ids, [2, 4, 1], real))


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.startswith("MLA")])
def test_naive_mla_equals_absorbed_mla(variant):
    model = decoder(variant)
    assert isinstance(model.cfg.attention, MLA)
    form = "naive" if model.cfg.attention.form == "absorbed" else "absorbed"
    other = same_weights(model, attention=replace(model.cfg.attention, form=form))
    ids, real = left_pad([list(range(7)), [4, 5, 6]])
    close(whole(other, ids, attention_mask=real), whole(model, ids, attention_mask=real))
    close(chunked(other, ids, [2, 4, 1]), whole(model, ids))


ROUTED = [name for name, c in VARIANTS.items() if "router" in c or name == "default"]


@pytest.mark.parametrize("variant", ROUTED)
def test_loop_and_sorted_experts_agree_gradients_included(variant):
    model = jittered(small(**VARIANTS[variant]))
    form = "sorted" if model.cfg.router.form == "loop" else "loop"
    other = same_weights(model, router=replace(model.cfg.router, form=form))
    ids = ids_of(model.cfg, 2, 7)
    outcomes = []
    for each in (model, other):
        logits, _ = each(ids)
        logits.square().mean().backward()
        outcomes.append([logits, *(p.grad for p in each.parameters())])
    for ours, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_a_window_as_wide_as_the_text_changes_nothing():
    model = decoder("default")
    ids = ids_of(model.cfg, 2, 9)
    wide, narrow = (same_weights(model, attention=GQA(window=w)) for w in (9, 8))
    close(whole(wide, ids), whole(model, ids))
    assert (whole(narrow, ids) - whole(model, ids))[:, -1].abs().max() > 1e-3


def test_alibi_needs_no_even_head():
    model = jittered(small(position=ALiBi(), d_head=5))
    ids = ids_of(model.cfg, 1, 6)
    close(chunked(model, ids, [4, 2]), whole(model, ids))
