"""Each planted mistake changes what it claims to change, and nothing else."""

import pytest
import torch

from course_lib import MLA, Config, ModernDecoder, new_caches
from course_lib.teaching import wrong
from course_lib.trace import diverge, trace

TOKENS, CHUNK = 12, 6


@pytest.fixture(scope="module")
def model():
    """A decoder whose QK-Norm gains are not 1, as after training."""
    torch.manual_seed(0)
    decoder = ModernDecoder(Config(n_layers=2))
    with torch.no_grad():
        for block in decoder.blocks:
            for norm in (block.attn.q_norm, block.attn.k_norm):
                norm.weight.uniform_(0.5, 1.5)
    return decoder


@pytest.fixture(scope="module")
def ids():
    return torch.randint(1000, (2, TOKENS), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def in_chunks(model, ids, split):
    caches = new_caches(model)
    logits = [model(part, caches, caches[0].length)[0] for part in ids.split(split, dim=1)]
    return torch.cat(logits, dim=1), sum(cache.nbytes for cache in caches)


def wrong_positions(model, ids, *mistakes, split=(CHUNK, TOKENS - CHUNK)) -> list[int]:
    right, _ = in_chunks(model, ids, [TOKENS])
    made, _ = in_chunks(wrong.with_mistakes(model, *mistakes), ids, list(split))
    return ((made - right).abs().amax(dim=(0, 2)) > 1e-4).nonzero().flatten().tolist()


EVERY, LATER, SECOND = range(TOKENS), range(1, TOKENS), range(CHUNK, TOKENS)
WHERE = {
    wrong.StepByStep: (),
    wrong.CacheExpanded: (),
    wrong.TiledHeads: EVERY,
    wrong.RopeOnV: LATER,
    wrong.NormAfterRope: LATER,
    wrong.UpperLeftMask: SECOND,
    wrong.PositionsRestart: SECOND,
}


@pytest.mark.parametrize("mistake", WHERE, ids=lambda mistake: mistake.__name__)
def test_a_mistake_shows_at_these_positions(model, ids, mistake):
    assert wrong_positions(model, ids, mistake) == list(WHERE[mistake])


def test_without_a_mask_every_position_is_wrong(model, ids):
    assert wrong_positions(model, ids, wrong.NoMask, split=(TOKENS,)) == list(EVERY)


def test_two_mistakes_of_position_are_one_when_tokens_come_singly(model, ids):
    one_by_one = [1] * TOKENS
    late, _ = in_chunks(wrong.with_mistakes(model, wrong.RopeAfterCache), ids, one_by_one)
    stuck, _ = in_chunks(wrong.with_mistakes(model, wrong.PositionsRestart), ids, one_by_one)
    right, _ = in_chunks(model, ids, one_by_one)
    assert torch.allclose(late, stuck, atol=1e-5)
    assert (late - right).abs().max() > 0.1


def test_expanding_first_costs_the_group_size_in_bytes(model, ids):
    _, right = in_chunks(model, ids, [TOKENS])
    _, made = in_chunks(wrong.with_mistakes(model, wrong.CacheExpanded), ids, [TOKENS])
    assert made == model.cfg.group_size * right


def test_mistakes_add_up(model, ids):
    assert wrong_positions(model, ids, wrong.RopeOnV, wrong.TiledHeads) == list(EVERY)
    both = wrong.with_mistakes(model, wrong.CacheExpanded, wrong.PositionsRestart)
    assert wrong_positions(model, ids, wrong.CacheExpanded, wrong.PositionsRestart) == list(SECOND)
    assert new_caches(both)[0].spec["k"] == (model.cfg.n_heads, model.cfg.d_head)


FIRST = {
    wrong.RopeOnV: "blocks.0.attn.v_expanded",
    wrong.NormAfterRope: "blocks.0.attn.q_rotated",
    wrong.TiledHeads: "blocks.0.attn.k_expanded",
    wrong.NoMask: "blocks.0.attn.scores",
}


@pytest.mark.parametrize("mistake", FIRST, ids=lambda mistake: mistake.__name__)
def test_diverge_names_where_a_mistake_enters(model, ids, mistake):
    made = trace(wrong.with_mistakes(model, mistake), ids, flops=False)
    assert diverge(trace(model, ids, flops=False), made).name == FIRST[mistake]


def test_the_weights_are_shared_and_the_model_stays_right(model, ids):
    before, _ = in_chunks(model, ids, [TOKENS])
    made = wrong.with_mistakes(model, wrong.TiledHeads)
    assert made.embed.weight is model.embed.weight
    assert torch.equal(in_chunks(model, ids, [TOKENS])[0], before)


def test_what_has_no_such_steps_is_refused(model):
    with pytest.raises(ValueError, match="neither a StepByStep nor a ModernDecoder"):
        wrong.with_mistakes(model, torch.nn.Linear)
    with pytest.raises(ValueError, match="MultiHeadLatentAttention has no such steps"):
        wrong.with_mistakes(ModernDecoder(Config(n_layers=1, attention=MLA())), wrong.RopeOnV)
