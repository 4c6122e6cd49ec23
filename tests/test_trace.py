"""One recorded forward pass: what is in it, what it costs, and where two of them part."""

import math
import re

import pytest
import torch

import course_lib.model
import course_lib.trace as tracing
from course_lib import GQA, MLA, left_pad, new_caches
from course_lib.trace import Divergence, Stage, Trace, diverge, expert_usage, trace, trace_block
from course_lib.zoo.counts import forward_flops
from tests.helpers import chunked, close, ids_of, jittered, numbers, small


def run_of(**changes):
    model = jittered(small(**changes))
    return model, trace(model, ids_of(model.cfg, 2, 5))


def test_the_stages_are_the_tensors_of_the_forward_pass():
    model, run = run_of()
    ids = run["ids"].value
    close(run["lm_head"].value, model(ids)[0].detach(), atol=0)
    close(run["embed"].value, model.embed(ids).detach(), atol=0)
    first = run.under("blocks.0")
    close(first["after_attn"].value, run["embed"].value + first["attn"].value, atol=0)
    close(first["after_ffn"].value, first["after_attn"].value + first["ffn"].value, atol=0)
    close(run["norm_f"].value, model.norm_f(run["blocks.2.after_ffn"].value).detach(), atol=0)
    names = [stage.name for stage in run]
    assert len(names) == len(set(names)) == len(run)
    assert not any(stage.value.requires_grad for stage in run)


@pytest.mark.parametrize("form", ["sdpa", "explicit"])
def test_scores_and_weights_belong_to_the_output(form):
    _, run = run_of(attention=GQA(form=form))
    attn = run.under("blocks.1.attn")
    q, k = attn["q_rotated"].value, attn["k_rotated"].value.repeat_interleave(2, dim=1)
    close(attn["k_expanded"].value, k, atol=0)
    scores = attn["scores"].value
    future = torch.ones(5, 5).triu(1).bool()
    assert (scores[..., future] == -math.inf).all()
    right = q @ k.transpose(-2, -1) / math.sqrt(8)
    close(scores.masked_fill(future, 0), right.masked_fill(future, 0))
    close(attn["weights"].value, scores.softmax(-1))
    close(attn["weights"].value @ attn["v_expanded"].value, attn["heads"].value)
    close(attn["concat"].value, attn["heads"].value.transpose(1, 2).flatten(2), atol=0)


def test_the_explicit_form_is_held_against_the_fused_one(monkeypatch):
    model = jittered(small())
    core = model.blocks[1].attn.core
    honest = core.explicit
    monkeypatch.setattr(core, "explicit", lambda *args: honest(*args) + 1e-3)
    with pytest.raises(AssertionError, match="not close"):
        trace(model, ids_of(model.cfg, 1, 5))


def test_flops_add_up_to_the_count_from_the_config():
    for changes in ({}, dict(n_experts=0), dict(attention=GQA(form="explicit"))):
        model, run = run_of(**changes)
        assert sum(stage.flops for stage in run) == 2 * forward_flops(model.cfg, 5)
    assert run["blocks.0.attn.q"].flops == 2 * 10 * 24 * 32
    assert run["blocks.0.attn.scores"].flops == 2 * 2 * 4 * 5 * 5 * 8
    quick = trace(model, ids_of(model.cfg, 2, 5), flops=False)
    assert all(stage.flops == 0 for stage in quick)


def test_a_stage_knows_its_bytes_its_line_and_its_shape():
    _, run = run_of()
    stage = run["blocks.1.ffn.router_logits"]
    assert (stage.axes, stage.shape, stage.nbytes) == ("N E", (10, 6), 10 * 6 * 4)
    assert repr(stage) == "blocks.1.ffn.router_logits 'N E' (10, 6)"
    file, line = run["blocks.1.attn.q"].source.split(":")
    text = (tracing.MODEL_FILES.parent / file).read_text(encoding="utf-8").splitlines()
    assert "self.see_q(" in text[int(line) - 1]
    assert run["ids"].source == "input"
    assert run.table().splitlines()[0].split()[:3] == ["ids", "B", "T"]
    assert len(run.table().splitlines()) == len(run)


def test_a_trace_leaves_no_hook_behind_even_if_the_run_fails():
    model = jittered(small())
    with pytest.raises(ValueError, match="vocab_size=41"):
        trace(model, torch.tensor([[99]]))
    trace(model, ids_of(model.cfg, 1, 3))
    modules = list(model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def test_a_trace_can_run_through_caches_and_padding():
    model = jittered(small())
    ids, real = left_pad([[3, 4, 5, 6], [7, 8]])
    caches = new_caches(model)
    chunked(model, ids, [4], real, caches)
    run = trace(model, torch.tensor([[9], [9]]), caches, 4)
    assert run["blocks.0.attn.scores"].shape == (2, 4, 1, 5)
    assert run["blocks.0.attn.k"].shape == (2, 2, 1, 8)
    assert run["blocks.0.attn.weights"].value[1, :, 0, :2].abs().max() == 0
    assert caches[0].length == 5


def test_a_padded_batch_can_be_traced():
    for attention in (GQA(), GQA(window=2), GQA(sinks=True)):
        model = jittered(small(attention=attention))
        ids, real = left_pad([[3, 4, 5, 6], [7, 8]])
        run = trace(model, ids, attention_mask=real)
        weights = run["blocks.1.attn.weights"].value
        assert weights[1, :, :2].abs().max() == 0, "a padding query gets nothing"
        assert weights[1, :, :, :2].abs().max() == 0, "a padding key gives nothing"
        close(run["lm_head"].value, model(ids, attention_mask=real)[0].detach(), atol=0)


def test_every_axis_letter_stands_in_the_legend():
    legend = course_lib.model.__doc__.split("Axis letters:")[1]
    letters = set(re.findall(r"\b([A-Za-z])\b", legend))
    for attention in (GQA(), MLA(16, 4, 8, 6), MLA(16, 4, 8, 6, form="naive")):
        run = trace(jittered(small(attention=attention)), torch.tensor([[1, 2]]), flops=False)
        used = {letter for stage in run for letter in re.findall("[A-Za-z]", stage.axes)}
        assert used <= letters


def test_one_block_alone():
    model, run = run_of()
    cos, sin = model.rope(torch.arange(5))
    alone = trace_block(model.blocks[1], run["blocks.0.after_ffn"].value, cos, sin)
    inside = run.under("blocks.1")
    assert [s.name for s in alone] == [s.name for s in inside]
    for ours, theirs in zip(alone, inside, strict=True):
        close(ours.value.nan_to_num(neginf=0), theirs.value.nan_to_num(neginf=0), atol=0)


def test_an_unknown_stage_is_answered_with_its_neighbours():
    _, run = run_of(n_experts=0)
    with pytest.raises(KeyError, match=r"no stage 'attn.q'; .*blocks.0.attn.q"):
        run["attn.q"]
    assert len(run.under("blocks.7")) == 0


def stages(**values) -> Trace:
    return Trace([Stage(name, "N", numbers(*v), 0, "here") for name, v in values.items()])


def test_diverge_names_the_first_stage_that_differs():
    a = stages(x=(1, 2), y=(3, 4), z=(5,))
    assert diverge(a, stages(x=(1, 2), y=(3, 4 + 1e-7), z=(5,))) is None
    first = diverge(a, stages(x=(1, 2), y=(3, 4.5), z=(6,)))
    assert first == Divergence("y", "largest difference 0.5", 0.5) and str(first).startswith("y: ")
    assert diverge(a, stages(x=(1, 2), y=(3,))).name == "y"
    assert diverge(a, stages(x=(1, 2), w=(3, 4))).reason == "(2,) against w (2,)"
    short = diverge(a, stages(x=(1, 2)))
    assert (short.name, short.reason, short.max_difference) == ("y", "only in one", math.inf)
    masked = stages(s=(-math.inf, 1))
    assert diverge(masked, stages(s=(-math.inf, 1))) is None
    assert diverge(masked, stages(s=(0, 1))).name == "s"
    assert diverge(stages(x=(1,)), stages(x=(math.nan,))).name == "x"


def test_diverge_finds_a_changed_layer_in_a_real_pass():
    model, run = run_of()
    with torch.no_grad():
        model.blocks[1].norm2.weight[3] += 0.5
    assert diverge(run, trace(model, ids_of(model.cfg, 2, 5))).name == "blocks.1.norm2"


def test_expert_usage_counts_slots():
    assert expert_usage(torch.tensor([[0, 2], [2, 3]]), 5) == [1, 0, 2, 1, 0]
