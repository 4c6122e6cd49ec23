"""Module 05's computations, each against a second way to get the same."""

import math

import pytest
import torch

from course_lib.model import (
    GQA,
    Config,
    ModernDecoder,
    Rope,
    apply_rope,
    inverse_frequencies,
)
from course_lib.teaching.lessons import rope as lesson
from course_lib.teaching.lessons.rope_figures import between

CFG = Config(
    vocab_size=50, d_model=24, n_layers=2, n_heads=3, n_kv_heads=1, d_head=8, n_experts=0, d_ff=32,
    attention=GQA(qk_norm=False),
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return ModernDecoder(CFG, init=None).eval()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(50, (1, 12), generator=torch.Generator().manual_seed(1))


def test_sinusoid_is_the_papers_formula():
    codes = lesson.sinusoid(torch.tensor([0, 3, 500]), 6, base=50.0)
    for row, p in zip(codes, (0, 3, 500), strict=True):
        for i in range(3):
            angle = p / 50.0 ** (2 * i / 6)
            assert row[2 * i].item() == pytest.approx(math.sin(angle), abs=1e-12)
            assert row[2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-12)


def test_closest_pair_finds_the_near_collisions():
    positions = torch.arange(1001)
    i, j, gap = lesson.closest_pair(positions.double().sin().unsqueeze(1))
    assert (i, j) == (11, 344) and gap == pytest.approx(1.33e-7, rel=1e-2)
    i, j, gap = lesson.closest_pair(lesson.sinusoid(positions, 8))
    assert (i, j) == (757, 820) and gap == pytest.approx(0.645, abs=1e-3)


def loss_by_hand(model, ids):
    logits = model(ids)[0][0].log_softmax(-1)
    return -logits[range(11), ids[0, 1:]].mean().item()


def test_text_loss_counts_from_the_first_token_asked_for(model, ids):
    assert lesson.text_loss(model, ids) == pytest.approx(loss_by_hand(model, ids), abs=1e-5)
    logits = model(ids)[0][0].log_softmax(-1)
    late = -logits[range(5, 11), ids[0, 6:]].mean().item()
    assert lesson.text_loss(model, ids, first=5) == pytest.approx(late, abs=1e-5)


def test_under_another_config_shares_the_weights(model, ids):
    other = lesson.under(model, position=Rope("interleaved"))
    assert other.embed.weight.data_ptr() == model.embed.weight.data_ptr()
    assert not torch.allclose(other(ids)[0], model(ids)[0], atol=1e-3)
    assert torch.equal(lesson.under(model)(ids)[0], model(ids)[0])


def test_keys_turned_rightly_change_nothing_and_by_one_position_much(model, ids):
    shapes = []

    def keys_at(shift):
        angle = (torch.arange(12)[:, None] + shift) * inverse_frequencies(8, 1e4).float()

        def turn(keys):
            shapes.append(tuple(keys.shape))
            return apply_rope(keys, angle.cos(), angle.sin())

        return lesson.keys_turned(model, turn)

    assert torch.allclose(keys_at(0)(ids)[0], model(ids)[0], atol=1e-5)
    assert not torch.allclose(keys_at(1)(ids)[0], model(ids)[0], atol=1e-2)
    assert set(shapes) == {(1, 1, 12, 8)}  # the one key head, never the three query heads


def test_spread_moves_the_later_tokens_only(model, ids):
    far = lesson.spread(model, at=5, gap=100)
    assert torch.equal(far.place(ids, None, 0, None)[0][4:7], torch.tensor([4, 105, 106]))
    assert torch.allclose(far(ids)[0][:, :5], model(ids)[0][:, :5], atol=1e-5)
    assert not torch.allclose(far(ids)[0], model(ids)[0], atol=1e-3)
    assert type(model) is ModernDecoder
    with pytest.raises(ValueError, match="gap=-1"):
        lesson.spread(model, at=5, gap=-1)


def test_mean_hands_predict_the_score_of_constant_heads():
    draw = torch.Generator().manual_seed(2)
    q, k = torch.randn(2, 8, generator=draw)
    freq = inverse_frequencies(8, 1e4)
    strength, phase = lesson.mean_hands(q.expand(5, 8), k.expand(5, 8), freq)
    angle = torch.tensor([[0.0], [7.0]]) * freq.float()
    key, query = (apply_rope(x[None], a[None].cos(), a[None].sin())[0] for x, a in
                  zip((k, q), angle, strict=True))  # fmt: skip
    predicted = (strength * (7 * freq + phase).cos()).sum()
    assert predicted.item() == pytest.approx((query @ key).item() / 8**0.5, abs=1e-5)
    with pytest.raises(ValueError, match="do not fit"):
        lesson.mean_hands(q.expand(5, 8), k.expand(5, 8), freq[:3])


def test_published_thetas_are_those_of_the_zoo():
    from course_lib.zoo import configs

    ours = {name: fields["rope_theta"] for name, fields in lesson.POSITION_FIELDS.items()}
    theirs = {model.name: model.rope_theta for model in configs.MODELS}
    shared = {name for name in ours if theirs.get(name)}
    assert len(shared) >= 7
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}


def test_the_arc_between_hands_goes_the_short_way():
    for query, key, size in ((3.0, 1.0, 2.0), (1.0, 3.0, 2.0), (6.0, 0.2, 2 * math.pi - 5.8)):
        start, found = between(query, key)
        assert found == pytest.approx(size)
        ends = {round(a % (2 * math.pi), 6) for a in (start, start + found)}
        assert ends == {round(query, 6), round(key, 6)}
