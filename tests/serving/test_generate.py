"""Generation: seeds, padding, limits, devices of its parts."""

import pytest
import torch

from course_lib import GQA, generate, left_pad
from tests.helpers import ids_of, jittered, small

PROMPT = [[3, 1, 4, 1]]


def test_a_seed_repeats_and_leaves_the_global_generator_alone():
    model, state = jittered(small()), torch.get_rng_state()
    first, again, other = (generate(model, PROMPT, 12, seed=s) for s in (5, 5, 6))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(0)
    drawn = generate(model, PROMPT, 12)
    torch.manual_seed(0)
    assert torch.equal(generate(model, PROMPT, 12), drawn)


@pytest.mark.parametrize(
    "how", [dict(top_k=3), dict(top_p=0.5), dict(min_p=0.3), dict(temperature=2.0)]
)
def test_cached_and_uncached_draw_the_same_tokens(how):
    model = jittered(small())
    rows = [[3, 1, 4, 1], [5, 9]]
    cached = generate(model, rows, 10, seed=3, **how)
    assert torch.equal(cached, generate(model, rows, 10, seed=3, use_cache=False, **how))


def test_prompts_of_any_kind():
    model = jittered(small())
    expected = generate(model, torch.tensor(PROMPT), 4, temperature=0)
    for prompt in (PROMPT, tuple(map(tuple, PROMPT)), [torch.tensor(PROMPT[0])]):
        assert torch.equal(generate(model, prompt, 4, temperature=0), expected)
    assert torch.equal(model.generate(PROMPT, 4, 0), expected)
    assert generate(model, torch.tensor(PROMPT, dtype=torch.int32), 4, temperature=0).shape == (
        1,
        8,
    )


def test_a_padded_tensor_with_its_mask_equals_a_list():
    model = jittered(small())
    rows = [[3, 1, 4, 1], [5, 9]]
    ids, real = left_pad(rows)
    assert ids.tolist() == [[3, 1, 4, 1], [0, 0, 5, 9]]
    assert real.tolist() == [[True] * 4, [False, False, True, True]]
    by_list = generate(model, rows, 5, temperature=0)
    assert torch.equal(generate(model, ids, 5, 0, attention_mask=real), by_list)
    assert torch.equal(generate(model, ids, 5, 0, attention_mask=real.long()), by_list)


def test_text_may_fill_every_position_and_not_one_more():
    model = jittered(small(max_seq_len=8))
    out = generate(model, PROMPT, 5, temperature=0)  # the last token needs no position
    assert out.shape == (1, 9)
    with pytest.raises(ValueError, match="max_new_tokens=6 .* at most 5 new tokens"):
        generate(model, PROMPT, 6)
    ids, real = left_pad([[1] * 7, [2]])
    assert generate(model, ids, 2, attention_mask=real, seed=0).shape == (2, 9)


def test_a_finished_row_is_filled_with_pad():
    model = jittered(small())
    free = generate(model, PROMPT, 8, temperature=0)[0, 4:].tolist()
    stop = free[2]
    stopped = generate(model, PROMPT, 8, temperature=0, eos_id=stop)[0, 4:].tolist()
    assert stopped == free[: free.index(stop) + 1]
    both = generate(model, [PROMPT[0], [7]], 8, temperature=0, eos_id=stop, pad_id=11)
    tail = both[0, 4 + len(stopped) :].tolist()
    assert both[0, 4 : 4 + len(stopped)].tolist() == stopped and set(tail) <= {11}


def test_a_window_model_writes_past_its_window():
    model = jittered(small(attention=GQA(window=3)))
    cached = generate(model, ids_of(model.cfg, 2, 6), 9, temperature=0)
    plain = generate(model, ids_of(model.cfg, 2, 6), 9, temperature=0, use_cache=False)
    assert torch.equal(cached, plain)
