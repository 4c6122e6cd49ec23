"""The compiled forms equal the readable ones; compiled once, at a small size."""

import shutil
import warnings
from functools import partial

import pytest
import torch

from course_lib import Config, ModernDecoder, generate, new_caches
from course_lib.serving import CompiledDecoder, FastDecoder, compile_decode
from course_lib.training import compile_forward
from course_lib.training.compiled import moe_forward

SMALL = dict(vocab_size=31, d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, d_head=8)
TINY = SMALL | dict(d_ff=24, n_experts=4, d_expert=8, max_seq_len=24)

needs_compiler = pytest.mark.skipif(
    not shutil.which("g++") and not shutil.which("clang++"), reason="no C++ compiler here"
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return ModernDecoder(Config(**TINY))


@pytest.fixture(scope="module")
def compiled(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler calls parts of torch that are deprecated
        return compile_decode(model, batch=1, capacity=17, prompt=5)


@needs_compiler
@pytest.mark.parametrize("prompt", (4, 5, 1), ids=("eager", "compiled", "none"))
@torch.inference_mode()
def test_a_compiled_step_equals_the_readable_form(model, compiled, prompt):
    assert isinstance(compiled, CompiledDecoder)
    ids = torch.randint(0, 31, (1, 17))
    step, caches = compiled.start(model, 1, 17), new_caches(model)
    expected = model(ids[:, :prompt], caches, 0)[0][:, -1]
    assert (step(ids[:, :prompt]) - expected).abs().max() < 1e-5
    for t in range(prompt, 17):
        expected = model(ids[:, t : t + 1], caches, t)[0][:, -1]
        assert (step(ids[:, t : t + 1]) - expected).abs().max() < 1e-5


@needs_compiler
def test_a_prompt_of_the_given_length_runs_in_its_program(model, compiled, monkeypatch):
    def fail(*given):
        raise AssertionError("the eager form was called")

    monkeypatch.setattr(FastDecoder, "step", fail)
    step = compiled.start(model, 1, 17)
    assert step(torch.zeros(1, 5, dtype=torch.long)).shape == (1, 31)
    with pytest.raises(ValueError, match="after 5 cached"):
        step(torch.zeros(1, 5, dtype=torch.long))
    with pytest.raises(AssertionError, match="eager"):
        compiled.start(model, 1, 17)(torch.zeros(1, 4, dtype=torch.long))


@needs_compiler
def test_generates_by_it_and_follows_the_weights(model, compiled):
    how = dict(max_new_tokens=8, temperature=0.0)
    for prompt in ([[1, 2, 3]], [[1, 2, 3, 4, 5]]):
        expected = generate(model, prompt, engine="readable", **how)
        assert torch.equal(generate(model, prompt, engine=compiled, **how), expected)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.1)


@needs_compiler
def test_several_rows_are_compiled_in_another_form_and_equal_too(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = compile_decode(model, batch=2, capacity=12, prompt=5)
    how = dict(max_new_tokens=7, temperature=0.0)
    prompt = torch.randint(0, 31, (2, 5))
    expected = generate(model, prompt, engine="readable", **how)
    assert torch.equal(generate(model, prompt, engine=engine, **how), expected)


@needs_compiler
def test_says_how_long_it_took_and_refuses_what_it_was_not_made_for(model, compiled):
    assert compiled.compile_seconds > 0
    with pytest.raises(ValueError, match="batch=2"):
        generate(model, [[1], [2]], 2, engine=compiled)
    with pytest.raises(ValueError, match="capacity=17"):
        generate(model, [[1, 2, 3]], 15, engine=compiled)
    with pytest.raises(ValueError, match="another model"):
        generate(ModernDecoder(Config(**TINY)), [[1]], 2, engine=compiled)


@pytest.mark.parametrize("bad", (dict(batch=0), dict(capacity=True), dict(prompt=1)))
def test_refuses_sizes_that_are_none(model, bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        compile_decode(model, **bad)


def test_the_opaque_experts_equal_the_layer_in_values_and_gradients(model):
    layer, x = model.blocks[1].ffn, torch.randn(2, 5, 16, requires_grad=True)
    given = [x, *layer.parameters()]
    found, expected = (run(x)[0].square().sum() for run in (partial(moe_forward, layer), layer))
    assert abs(found - expected) < 1e-5
    pairs = (torch.autograd.grad(loss, given) for loss in (found, expected))
    for a, b in zip(*pairs, strict=True):
        assert (a - b).abs().max() < 1e-5


@pytest.mark.parametrize("compile_it", (compile_decode, compile_forward))
def test_says_in_a_sentence_that_the_compiler_is_missing(model, monkeypatch, compile_it):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="C\\+\\+ compiler 'no-such-compiler'.*eager form"):
        compile_it(model)


@needs_compiler
def test_the_compiled_forward_refuses_what_the_model_refuses(model):
    forward = compile_forward(model)  # compiles at its first call only
    with pytest.raises(ValueError, match="vocab_size=31"):
        forward(torch.tensor([[31, 1]]))
    with pytest.raises(ValueError, match="max_seq_len=24"):
        forward(torch.zeros(1, 25, dtype=torch.long))
