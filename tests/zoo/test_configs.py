"""Published sizes give the published numbers of weights, exactly where an oracle exists."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from course_lib.zoo.configs import (
    MODELS,
    TAGS,
    cached,
    count_published,
    counted,
    kv,
    published,
    published_cache_bytes,
)
from course_lib.zoo.counts import cache_bytes

ORACLE = json.loads((Path(__file__).parents[1] / "data/parameter-totals.json").read_text("utf-8"))
TOTALS = {row["model"]: row for row in ORACLE["models"]}
NOT_OURS = {"gpt2-small", "Qwen3-Next-80B-A3B"}  # learned positions; linear attention
COUNTED = sorted(set(TOTALS) - NOT_OURS)


@pytest.mark.parametrize("name", COUNTED)
def test_counts_are_those_of_the_reference_implementation(name):
    count, want = count_published(published(name)), TOTALS[name]
    embedding = 0 if published(name).tied else count.embedding
    assert count.total == want["total"]
    assert count.active == want["active"]
    assert count.active - embedding == want["active_without_input_embedding"]
    assert count.routed == want["routed"]
    assert published(name).tied == want["tied"]


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("Llama-4-Maverick", "400.71", "17.18"), ("MiniMax-M2", "228.69", "11.03")],
)
def test_counts_without_an_oracle_are_those_of_a_recount(name, total, active):
    count = count_published(published(name))
    assert (f"{count.total / 1e9:.2f}", f"{count.active / 1e9:.2f}") == (total, active)


def test_counts_lie_within_the_rounding_of_the_makers():
    for model in counted():
        count = count_published(model)
        assert count.total / 1e9 == pytest.approx(model.total, rel=0.06), model.name
        if model.active:
            embedding = 0 if model.tied else count.embedding
            low, high = (count.active - embedding) / 1e9, count.active / 1e9
            assert low * 0.94 <= model.active <= high * 1.06, model.name


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("gpt-oss-20b", dict(biases=())),
        ("GLM-4.5", dict(first_k_dense=0)),
        ("Llama-4-Maverick", dict(moe_every=1)),
        ("OLMoE-1B-7B", dict(flat_qk_norm=False)),
        ("Qwen1.5-MoE-A2.7B", dict(shared_gate=False)),
        ("Qwen1.5-MoE-A2.7B", dict(d_shared=None)),
        ("DeepSeek-V2", dict(n_shared_experts=1)),
    ],
)
def test_each_particular_of_a_model_counts(name, wrong):
    assert (
        count_published(replace(published(name), **wrong)).total
        != count_published(published(name)).total
    )


def test_names_are_single_and_rows_say_how_sure_they_are():
    assert len({model.name for model in MODELS}) == len(MODELS)
    for model in MODELS:
        assert model.tag in TAGS
        assert model.note or model.tag != "recalled", f"{model.name}: say what was recalled"


def test_a_model_that_no_config_describes_is_refused_by_name():
    with pytest.raises(ValueError, match="Kimi-Linear-48B: 20 of its 27 layers"):
        count_published(published("Kimi-Linear-48B"))
    with pytest.raises(ValueError, match="name='GPT-7' is no model here"):
        published("GPT-7")
    with pytest.raises(ValueError, match=r"biases=\('up',\)"):
        replace(MODELS[0], biases=("up",))
    with pytest.raises(ValueError, match="tag='hearsay'"):
        replace(MODELS[0], tag="hearsay")


KIB_A_TOKEN = {"OLMo-2-7B": 512, "Gemma-3-27B": 496, "GLM-4.5": 368, "Llama-3-70B": 320,
               "Qwen3-32B": 256, "MiniMax-M2": 248, "Trinity-Large": 240, "Llama-4-Maverick": 192,
               "Qwen3-235B-A22B": 188, "Qwen3-14B": 160, "Mistral-Small-3.1": 160, "Qwen3-4B": 144,
               "Llama-3-8B": 128, "Qwen3-0.6B": 112, "Qwen3-30B-A3B": 96, "GLM-5": 87.75,
               "gpt-oss-120b": 72, "SmolLM3-3B": 72, "DeepSeek-V3": 68.625, "Kimi-K2": 68.625,
               "Mistral-Large-3": 68.625, "gpt-oss-20b": 48, "Qwen3-Next-80B-A3B": 24,
               "Kimi-Linear-48B": 7.875, "Nemotron-3-Nano": 6}  # fmt: skip


def test_cache_of_published_models_by_an_independent_count():
    for name, want in KIB_A_TOKEN.items():
        assert published_cache_bytes(published(name), 1, windows=False) == want * 2**10, name
    for name, want in {"Gemma-3-27B": "2.906", "Olmo-3-7B": "5.500", "Gemma-4-31B": "3.281",
                       "Trinity-Large": "2.578"}.items():  # fmt: skip
        assert f"{published_cache_bytes(published(name), 2**15) / 2**30:.3f}" == want, name


def test_cache_of_published_models_is_that_of_their_config():
    for model in counted():
        if not model.layers:
            want = cache_bytes(model.config(), 77, batch=3)
            assert published_cache_bytes(model, 77, 3) == want, model.name
    small = published("Gemma-3-1B")
    assert published_cache_bytes(small, 100) == published_cache_bytes(small, 100, windows=False)
    assert 4 * published_cache_bytes(small, 9, bits=4) == published_cache_bytes(small, 9)


def test_layers_of_a_model_are_as_many_as_it_has_attention_layers():
    linear = {"Qwen3-Next-80B-A3B": 12, "Nemotron-3-Nano": 6, "Kimi-Linear-48B": 7}
    for model in cached():
        if model.layers:
            assert sum(layer.n for layer in model.layers) == linear.get(model.name, model.n_layers)
    assert kv(4, 192, 128) == 4 * (192 + 128)


def test_a_cache_that_is_not_known_is_refused_by_name():
    with pytest.raises(ValueError, match="MiMo-V2-Flash: its key/value heads"):
        published_cache_bytes(published("MiMo-V2-Flash"), 1)
