"""The fast form equals the readable one, follows every change of the weights, and steps aside
where it does not apply."""

import pytest
import torch

from course_lib import (
    GQA,
    MLA,
    ALiBi,
    Config,
    ModernDecoder,
    RMSNorm,
    Rope,
    Router,
    YaRN,
    generate,
    new_caches,
    training_step,
)
from course_lib.serving import fast
from course_lib.serving.fast import FastDecoder, why_not_fast

SMALL = dict(vocab_size=97, d_model=64, n_layers=3, d_ff=96, d_expert=24, max_seq_len=96)


def jittered(cfg: Config, seed: int = 0) -> ModernDecoder:
    """A decoder whose gains and weights are large enough for a mistake to show."""
    torch.manual_seed(seed)
    model = ModernDecoder(cfg)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.2)
            else:
                weight.mul_(3)
    return model


@torch.inference_mode()
def differences(model, batch: int, prompt: int, new: int = 4) -> list[float]:
    """Largest difference of the logits behind the prompt and behind each new token."""
    ids = torch.randint(0, model.cfg.vocab_size, (batch, prompt + new))
    decoder, caches = FastDecoder(model, batch, prompt + new), new_caches(model)
    found, start = [], 0
    for end in range(prompt, prompt + new + 1):
        part = ids[:, start:end]
        expected = model(part, caches, start)[0][:, -1]
        found.append((decoder.step(part) - expected).abs().max().item())
        start = end
    return found


CONFIGS = {
    "course": Config(),
    "dense": Config(**SMALL, n_experts=0),
    "64 experts": Config(**SMALL, n_experts=64, n_experts_active=6, n_shared_experts=2),
    "no shared": Config(**SMALL, n_shared_experts=0),
    "sigmoid router": Config(
        **SMALL, router=Router(kind="sigmoid", selection_bias=True, n_groups=4, n_groups_active=2)
    ),
    "no qk_norm": Config(**SMALL, attention=GQA(qk_norm=False)),
    "one kv head": Config(**SMALL, n_kv_heads=1),
    "as many kv heads": Config(**SMALL, n_kv_heads=8),
    "yarn": Config(**SMALL, position=Rope(scaling=YaRN(factor=4.0, original_length=32))),
    "untied": Config(**SMALL, tied=False),
    "one layer": Config(**(SMALL | {"n_layers": 1})),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("batch", (1, 2, 8))
@pytest.mark.parametrize("prompt", (1, 2, 33))
def test_equals_the_readable_form(name, batch, prompt):
    torch.manual_seed(batch)
    assert max(differences(jittered(CONFIGS[name]), batch, prompt)) < 1e-5


def test_equals_it_far_into_a_long_context():
    model = jittered(Config(**(SMALL | {"max_seq_len": 1100, "n_layers": 2})))
    assert max(differences(model, batch=1, prompt=1024)) < 1e-5


def test_follows_a_training_step_and_a_loaded_state():
    model = jittered(Config(**SMALL))
    ids = torch.randint(0, 97, (2, 16))
    before = generate(model, ids, 4, 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        training_step(model, optimizer, ids)
    assert max(differences(model, 2, 16)) < 1e-5
    assert not torch.equal(before, generate(model, ids, 4, 0.0))
    other = jittered(Config(**SMALL), seed=1)
    for assign in (False, True):
        model.load_state_dict(other.state_dict(), assign=assign)
        assert max(differences(model, 2, 16)) < 1e-5


def test_a_running_decoder_sees_the_weights_change():
    model = jittered(Config(**SMALL))
    decoder = FastDecoder(model, 1, 8)
    with torch.no_grad():
        model.blocks[1].ffn.experts[0].w_down.weight.mul_(2)
        model.blocks[2].attn.W_q.weight.mul_(2)
    ids = torch.randint(0, 97, (1, 8))
    assert (decoder.step(ids) - model(ids)[0][:, -1]).abs().max() < 1e-5


def test_adds_nothing_to_the_state_dict():
    model = jittered(Config(**SMALL))
    names = set(model.state_dict())
    generate(model, [[1, 2]], 2)
    assert set(model.state_dict()) == names
    assert all(weight.requires_grad for weight in model.parameters())


@pytest.mark.parametrize("engine", ("fast", "readable"))
def test_generate_draws_the_same_tokens_by_every_engine(engine):
    model = jittered(Config(**SMALL))
    how = dict(max_new_tokens=12, temperature=0.8, seed=3, top_k=20)
    for prompt in ([[5, 6, 7]], [[1, 2], [3, 4]], [[1, 2, 3], [4]]):
        expected = generate(model, prompt, use_cache=False, **how)
        assert torch.equal(generate(model, prompt, engine=engine, **how), expected)


class OtherNorm(RMSNorm):
    def forward(self, x):
        return super().forward(x) * 2


def with_other_norm(model):
    model.blocks[0].norm1.__class__ = OtherNorm


def with_hook(model):
    model.blocks[0].ffn.register_forward_hook(lambda *_: None)


def with_own_forward(model):
    model.norm_f.forward = lambda x: x


def with_half_a_layer_cast(model):
    model.blocks[0].ffn.double()


def with_window(model):
    model.blocks[1].attn.core.window = 4


def with_other_rotation(model):
    model.blocks[1].attn.rotate = lambda x, cos, sin: x


CHANGES = (
    with_other_norm,
    with_hook,
    with_own_forward,
    with_half_a_layer_cast,
    with_window,
    with_other_rotation,
)


@pytest.mark.parametrize("change", CHANGES)
def test_steps_aside_where_the_model_was_changed(change):
    model = jittered(Config(**SMALL))
    assert why_not_fast(model) is None
    change(model)
    reason = why_not_fast(model)
    assert reason and reason.endswith(".")
    with pytest.raises(ValueError, match="readable"):
        FastDecoder(model, 1, 4)


def test_a_replaced_forward_is_seen_on_the_class(monkeypatch):
    model = jittered(Config(**SMALL))
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: x)
    assert "another forward" in why_not_fast(model)


NOT_COVERED = (
    dict(attention=MLA()),
    dict(attention=GQA(window=8)),
    dict(attention=GQA(sinks=True)),
    dict(attention=GQA(form="explicit")),
    dict(position=ALiBi()),
    dict(position=Rope(pairing="interleaved")),
    dict(position=Rope(fraction=0.5)),
    dict(position=Rope(nope_every=2)),
)


@pytest.mark.parametrize("part", NOT_COVERED, ids=str)
def test_generates_in_the_readable_form_what_it_does_not_cover(part):
    model = jittered(Config(**SMALL, **part))
    assert why_not_fast(model)
    prompt, how = [[1, 2, 3]], dict(max_new_tokens=5, temperature=0.0)
    expected = generate(model, prompt, use_cache=False, **how)
    assert torch.equal(generate(model, prompt, **how), expected)


def test_refuses_what_does_not_fit():
    decoder = FastDecoder(jittered(Config(**SMALL)), 1, 4)
    decoder.step(torch.tensor([[1, 2]]))
    for ids in ([[1, 2]], [[1], [2]]):
        with pytest.raises(ValueError, match="ids="):
            decoder.step(torch.tensor(ids))
    decoder.step(torch.tensor([[3]])), decoder.step(torch.tensor([[3]]))
    with pytest.raises(ValueError, match="capacity=4"):
        decoder.step(torch.tensor([[3]]))
    with pytest.raises(ValueError, match="engine='quick'"):
        generate(jittered(Config(**SMALL)), [[1]], 1, engine="quick")


def forget_the_signs(cos, sin, like):
    cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    return cos.unsqueeze(1), sin.unsqueeze(1)


class NoEps(fast.FastNorm):
    def __init__(self, norms):
        super().__init__(norms)
        self.least = self.gain.new_tensor(0.1)


class KeepsAllWeightsOne(fast.FastSwiGLU):
    def __call__(self, x, h, weight=1.0):
        return super().__call__(x, h)


MUTANTS = {
    "doubled": forget_the_signs,
    "FastNorm": NoEps,
    "FastSwiGLU": KeepsAllWeightsOne,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_comparison_notices_a_mistake(name, monkeypatch):
    monkeypatch.setattr(fast, name, MUTANTS[name])
    assert max(differences(jittered(Config(**SMALL)), 1, 8)) > 1e-3
