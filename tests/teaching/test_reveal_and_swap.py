"""`source` shows the library's text without a path of this machine; `swap` never half-changes."""

import inspect

import pytest
import torch
import torch.nn.functional as F

from course_lib import (
    MLA,
    Config,
    GroupedQueryAttention,
    ModernDecoder,
    MoE,
    SwiGLU,
    new_caches,
    next_token_loss,
)
from course_lib.teaching import source, swap
from course_lib.teaching.exercises import EXERCISES, load
from course_lib.teaching.reveal import place_of

SMALL = dict(vocab_size=40, d_model=16, n_layers=3, n_heads=4, d_head=8, d_ff=24, d_expert=8)


@pytest.fixture
def model():
    torch.manual_seed(3)
    return ModernDecoder(Config(**SMALL), init=None).eval()


# source


@pytest.mark.parametrize("obj", [MoE, MoE.forward, next_token_loss], ids=lambda o: o.__qualname__)
def test_source_is_the_text_with_file_and_lines(obj):
    shown = source(obj)
    lines, first = inspect.getsourcelines(obj)
    assert shown.text == "".join(lines).rstrip()
    assert shown.place.startswith("course_lib/")
    assert shown.place.endswith(f".py, lines {first} to {first + len(lines) - 1}")
    assert repr(shown) == f"# {shown.place}\n{shown.text}"


def test_source_is_coloured_for_light_and_dark():
    html = source(next_token_loss)._repr_html_()
    assert "var(--jp-mirror-editor-keyword-color)" in html and "next_token_loss" in html


def test_source_of_objects_modules_libraries_and_exercises(model):
    assert source(model.blocks[1].ffn).text == source(MoE).text
    assert source(model.blocks[1].ffn.forward).text == source(MoE.forward).text
    assert source(inspect.getmodule(MoE)).place.startswith("course_lib/model/moe.py, lines 1 to ")
    assert source(torch.nn.Linear).place.startswith("torch/nn/modules/linear.py, lines ")
    for name in EXERCISES:
        assert source(name).text in inspect.getsource(load(name).reference)


@pytest.mark.parametrize("obj, said", [
    (F.scaled_dot_product_attention, "scaled_dot_product_attention has no Python text"),
    (3, "int has no Python text"),
    ("top_k", "exercise='top_k' is unknown"),
])  # fmt: skip
def test_what_has_no_text_is_refused_in_a_sentence(obj, said):
    with pytest.raises(ValueError, match=said):
        source(obj)


def test_source_of_a_notebook_cell_names_no_path(tmp_path):
    file = tmp_path / "cell.py"
    file.write_text("def f(x):\n    return x\n", encoding="utf-8")
    names = {}
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), names)
    assert source(names["f"]).place == "this notebook, lines 1 to 2"
    assert place_of(file, 7, 1) == "this notebook, line 7"


# swap


class Mine(GroupedQueryAttention):
    def forward(self, x, cos, sin, cache=None, mask=None):
        return super().forward(x, cos, sin, cache, mask)


class Scaled(GroupedQueryAttention):
    def forward(self, x, cos, sin, cache=None, mask=None):
        return 2 * super().forward(x, cos, sin, cache, mask)


class OnlyCached(GroupedQueryAttention):
    """Right without a cache, wrong with one."""

    def forward(self, x, cos, sin, cache=None, mask=None):
        out = super().forward(x, cos, sin, cache, mask)
        return out if cache is None else 2 * out


class Crashes(GroupedQueryAttention):
    def forward(self, x, cos, sin, cache=None, mask=None):
        return self.W_q(x) @ x


class MyMoE(MoE):
    def forward(self, x):
        return super().forward(x)


class MySwiGLU(SwiGLU):
    def forward(self, x):
        return super().forward(x)


def logits_of(model):
    with torch.no_grad():
        return model(torch.arange(12).view(2, 6))[0]


@pytest.mark.parametrize("part, layers, name", [
    (Mine, "layers 0 to 2", "attn"), (MyMoE, "layers 1 to 2", "ffn"), (MySwiGLU, "layer 0", "ffn"),
])  # fmt: skip
def test_swap_puts_the_class_where_it_fits(model, part, layers, name, capsys):
    before = logits_of(model)
    swapped = swap(model, part)
    line = f"{part.__name__} runs in {layers}: logits unchanged (< 0.0001: True), at once and "
    assert capsys.readouterr().out == line + "with a cache.\n"
    places = [i for i, b in enumerate(swapped.blocks) if type(getattr(b, name)) is part]
    assert places and not any(type(getattr(b, name)) is part for b in model.blocks)
    assert torch.equal(before, logits_of(model))
    assert torch.allclose(before, logits_of(swapped), atol=1e-5)


def test_swap_in_one_layer(model, capsys):
    swapped = swap(model, Mine, layer=1)
    assert [type(b.attn) is Mine for b in swapped.blocks] == [False, True, False]
    assert capsys.readouterr().out.startswith("Mine runs in layer 1: ")


def test_swapped_copy_shares_the_weights_and_keeps_the_tie(model):
    swapped = swap(model, Mine)
    own = dict(model.named_parameters())
    assert own and all(own[name] is p for name, p in swapped.named_parameters())
    assert swapped.lm_head.weight is swapped.embed.weight


@pytest.mark.parametrize("part", [Scaled, OnlyCached])
def test_changed_logits_are_said(model, part, capsys):
    swap(model, part)
    assert "logits change by up to " in capsys.readouterr().out


@pytest.mark.parametrize("part, layer, said", [
    (Crashes, None, r"part=Crashes: it stops at line \d+, `return self.W_q\(x\) @ x`: "),
    (torch.nn.Linear, None, "part=Linear fits no block: no part of block 0 has forward"),
    (MySwiGLU, 1, "part=MySwiGLU fits no block: built for block 1, its weights have other names"),
    (3, None, "part=int is not a class"),
    (Mine, 3, "layer=3 is not a layer"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_and_the_model_untouched(model, part, layer, said, capsys):
    before = logits_of(model)
    with pytest.raises(ValueError, match=said):
        swap(model, part, layer)
    assert torch.equal(before, logits_of(model)) and capsys.readouterr().out == ""


def test_attention_of_another_kind_is_refused():
    latent = ModernDecoder(Config(**SMALL, attention=MLA()))
    with pytest.raises(ValueError, match="Mine fits no block: built for block 0, it stops"):
        swap(latent, Mine)


def test_swap_draws_nothing_from_the_global_generator(model):
    before = torch.get_rng_state()
    swap(model, Mine)
    assert torch.equal(before, torch.get_rng_state())


def test_swapped_decoder_generates(model):
    ids = torch.tensor([[1, 2, 3]])
    swapped = swap(model, Mine)
    a, b = (m.generate(ids, 5, temperature=0) for m in (model, swapped))
    assert torch.equal(a, b) and len(new_caches(swapped)) == 3
