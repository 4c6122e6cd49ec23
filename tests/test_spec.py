"""The numbers that the course's own document prints (module 16), reproduced by the library."""

import functools
import json
import math
from pathlib import Path

import pytest
import torch

from course_lib import Config, ModernDecoder, losses, training_step
from course_lib.trace import expert_usage, trace, trace_block
from course_lib.zoo.counts import count_parameters, numel
from tests.helpers import chunked, close, ids_of

SPEC = json.loads((Path(__file__).parent / "data/module-16.json").read_text(encoding="utf-8"))
STEP = SPEC["training_step"]
FIELDS = [
    ("vocab_size", 1000),
    ("d_model", 256),
    ("n_layers", 4),
    ("n_heads", 8),
    ("n_kv_heads", 2),
    ("d_head", 32),
    ("d_ff", 512),
    ("n_experts", 8),
    ("n_experts_active", 2),
    ("n_shared_experts", 1),
    ("d_expert", 128),
    ("first_k_dense", 1),
    ("rope_theta", 10000.0),
    ("max_seq_len", 512),
    ("norm_eps", 1e-6),
]


def seeded(seed: int = 0, **init):
    """The model that the document builds, and the generator right behind it."""
    torch.manual_seed(seed)
    return ModernDecoder(Config(), **init)


@pytest.fixture(autouse=True)
def keep_the_global_generator():
    with torch.random.fork_rng():
        yield


def test_fields_and_defaults():
    assert [(name, getattr(Config(), name)) for name in Config.__dataclass_fields__][:15] == FIELDS


def test_parameters():
    count = count_parameters(Config())
    got = dict(total=count.total, routed=count.routed, shared=count.shared, active=count.active)
    assert got == SPEC["parameters"]
    assert numel(ModernDecoder(Config())) == count.total
    shares = f"{count.active / count.total:.1%} {count.routed / count.total:.1%}"
    assert shares == "55.4% 59.5%"


def test_training_step_and_prompt():
    model = seeded()
    ids = torch.randint(1000, (2, 16))
    targets = torch.randint(1000, (2, 16))
    next_token = losses(model, ids)[0].item()
    report = training_step(model, torch.optim.SGD(model.parameters(), lr=0.0), ids, targets)
    # float: the last digit may move on another processor
    assert report.cross_entropy == pytest.approx(STEP["cross_entropy"], abs=2e-4)
    assert report.aux == pytest.approx(STEP["aux"], abs=1e-4)
    assert report.grad_norm == pytest.approx(STEP["grad_norm"], abs=2e-3)
    assert next_token == pytest.approx(STEP["cross_entropy_next_token"], abs=2e-4)
    assert math.log(1000) == pytest.approx(STEP["ln_vocab"], abs=5e-5)
    prompt = torch.randint(1000, (1, 5))
    assert prompt[0].tolist() == SPEC["prompt"]
    out = model.generate(prompt, max_new_tokens=10)
    assert out.shape == (1, 15) and torch.equal(out[:, :5], prompt)


def test_broken_init():
    model = seeded(init=None)
    ids, targets = torch.randint(1000, (2, 16)), torch.randint(1000, (2, 16))
    with torch.no_grad():
        broken = losses(model, ids, targets)[0].item()
    assert broken == pytest.approx(STEP["cross_entropy_default_init"], abs=0.1)


@functools.cache
def default_model(n_experts: int) -> ModernDecoder:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ModernDecoder(Config(n_experts=n_experts))


@pytest.mark.parametrize("n_experts", [8, 0], ids=["experts", "dense"])
@pytest.mark.parametrize("rows", [1, 2])
def test_cache_equivalence_at_every_position(n_experts, rows):
    model, ids = default_model(n_experts), ids_of(Config(), rows, 8, seed=1)
    with torch.no_grad():
        whole = model(ids)[0]
    for split in ([8], [1] * 8, [3, 2, 3], [7, 1]):
        close(chunked(model, ids, split), whole, atol=SPEC["cache_equivalence_below"])


SHAPES = {
    "ids": (1, 6),
    "embed": (1, 6, 256),
    "blocks.1.norm1": (1, 6, 256),
    "blocks.1.attn.q": (1, 8, 6, 32),
    "blocks.1.attn.k": (1, 2, 6, 32),
    "blocks.1.attn.v": (1, 2, 6, 32),
    "blocks.1.attn.q_rotated": (1, 8, 6, 32),
    "blocks.1.attn.k_rotated": (1, 2, 6, 32),
    "blocks.1.attn.k_expanded": (1, 8, 6, 32),
    "blocks.1.attn.v_expanded": (1, 8, 6, 32),
    "blocks.1.attn.scores": (1, 8, 6, 6),
    "blocks.1.attn.heads": (1, 8, 6, 32),
    "blocks.1.attn.concat": (1, 6, 256),
    "blocks.1.attn": (1, 6, 256),
    "blocks.1.after_attn": (1, 6, 256),
    "blocks.1.norm2": (1, 6, 256),
    "blocks.1.ffn.router_logits": (6, 8),
    "blocks.1.ffn.chosen": (6, 2),
    "blocks.1.ffn": (1, 6, 256),
    "blocks.1.after_ffn": (1, 6, 256),
    "lm_head": (1, 6, 1000),
}


def test_shape_trace_and_expert_usage():
    model = seeded()
    ids = torch.randint(1000, (1, 6))
    assert ids[0].tolist() == SPEC["trace_ids"]
    run = trace(model, ids, flops=False)
    assert {name: run[name].shape for name in SHAPES} == SHAPES
    chosen = {str(layer): run[f"blocks.{layer}.ffn.chosen"].value for layer in (1, 2, 3)}
    usage = {layer: expert_usage(c, 8) for layer, c in chosen.items()}
    assert usage == SPEC["expert_usage_in_forward"]
    assert chosen["1"].tolist() == [[7, 1], [7, 1], [1, 0], [5, 1], [5, 1], [1, 6]]
    # what the document prints: block 1 fed the embeddings, block 0 skipped
    alone = trace_block(model.blocks[1], run["embed"].value, *model.rope(torch.arange(6)))
    chosen = alone["ffn.chosen"].value
    assert expert_usage(chosen, 8) == SPEC["expert_usage_block1_on_embeddings"]
    assert [sorted(row) for row in chosen[:2].tolist()] == [[0, 7], [0, 7]]


@pytest.mark.parametrize("change", [dict(n_experts=0), dict(n_kv_heads=8), dict(n_kv_heads=1)])
def test_the_offered_settings_build_train_and_generate(change):
    torch.manual_seed(0)
    model = ModernDecoder(Config(**change))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(1000, (2, 16))
    first = training_step(model, optimizer, ids)
    second = training_step(model, optimizer, ids)
    assert second.cross_entropy < first.cross_entropy
    assert model.generate(ids[:, :4], 5, seed=0).shape == (2, 9)
