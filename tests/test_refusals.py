"""Bad configs and calls: each a ValueError that names field and value, with nothing half done."""

import functools
import math
import re
from types import SimpleNamespace

import pytest
import torch

from course_lib import (
    GQA,
    MLA,
    NTK,
    ALiBi,
    Config,
    Interpolation,
    KVCache,
    Llama3,
    ModernDecoder,
    RollingCache,
    Rope,
    Router,
    YaRN,
    causal_mask,
    generate,
    left_pad,
    load_balancing_loss,
    new_caches,
    next_token_loss,
    next_token_probabilities,
    route,
    training_step,
)
from course_lib.model import apply_rope, expert_capacity
from course_lib.zoo.checkpoints import load
from tests.helpers import jittered, numbers, small

NAN, INF = math.nan, math.inf

CONFIGS = [  # what is built, then what the message must name
    (lambda: Config(vocab_size=0), "vocab_size=0"),
    (lambda: Config(d_model=-8), "d_model=-8"),
    (lambda: Config(d_model=256.0), "d_model=256.0"),
    (lambda: Config(n_layers="4"), "n_layers='4'"),
    (lambda: Config(n_layers=True), "n_layers=True"),
    (lambda: Config(n_heads=6, n_kv_heads=4), "n_heads=6", "n_kv_heads=4", "[1, 2, 3, 6]"),
    (lambda: Config(n_heads=2, n_kv_heads=4), "n_heads=2", "n_kv_heads=4"),
    (lambda: Config(n_kv_heads=0), "n_kv_heads=0"),
    (lambda: Config(d_head=33), "d_head=33"),
    (lambda: Config(d_ff=None), "d_ff=None"),
    (lambda: Config(n_experts=-1), "n_experts=-1"),
    (lambda: Config(n_experts=4, n_experts_active=5), "n_experts_active=5", "n_experts=4"),
    (lambda: Config(n_experts_active=0), "n_experts_active=0"),
    (lambda: Config(n_experts_active=1), "n_experts_active=1", "kind='softmax_selected'"),
    (lambda: Config(n_shared_experts=-1), "n_shared_experts=-1"),
    (lambda: Config(d_expert=0), "d_expert=0"),
    (lambda: Config(first_k_dense=5), "first_k_dense=5", "n_layers=4"),
    (lambda: Config(first_k_dense=-1), "first_k_dense=-1"),
    (lambda: Config(rope_theta=0.0), "rope_theta=0.0"),
    (lambda: Config(rope_theta=1.0), "rope_theta=1.0"),
    (lambda: Config(rope_theta=INF), "rope_theta=inf"),
    (lambda: Config(max_seq_len=0), "max_seq_len=0"),
    (lambda: Config(norm_eps=NAN), "norm_eps=nan"),
    (lambda: Config(norm_eps=0), "norm_eps=0"),
    (lambda: Config(tied="no"), "tied='no'"),
    (lambda: Config(attention="GQA"), "attention='GQA'"),
    (lambda: Config(position=None), "position=None"),
    (lambda: Config(router="sigmoid"), "router='sigmoid'"),
    (lambda: Config(attention=MLA(), position=ALiBi()), "position=ALiBi()"),
    (lambda: Config(attention=MLA(), position=Rope(fraction=0.5)), "fraction=0.5"),
    (lambda: Config(position=Rope(fraction=0.01)), "d_head=32", "fraction=0.01"),
    (lambda: Config(router=Router(n_groups=3)), "n_experts=8", "n_groups=3"),
    (
        lambda: Config(n_experts_active=3, router=Router(n_groups=4)),
        "n_experts_active=3",
        "n_groups_active=1",
    ),
    (lambda: Router("top2"), "kind='top2'"),
    (lambda: Router(n_groups=2, n_groups_active=3), "n_groups_active=3", "n_groups=2"),
    (lambda: Router(scaling=0), "scaling=0"),
    (lambda: Router(form="fast"), "form='fast'"),
    (lambda: Router(normalize=1), "normalize=1"),
    (lambda: GQA(window=0), "window=0"),
    (lambda: GQA(form="flash"), "form='flash'"),
    (lambda: GQA(sinks="yes"), "sinks='yes'"),
    (lambda: MLA(d_rope=15), "d_rope=15"),
    (lambda: MLA(kv_lora_rank=0), "kv_lora_rank=0"),
    (lambda: MLA(q_lora_rank=0), "q_lora_rank=0"),
    (lambda: MLA(form="eager"), "form='eager'"),
    (lambda: Rope("halves"), "pairing='halves'"),
    (lambda: Rope(fraction=1.5), "fraction=1.5"),
    (lambda: Rope(nope_every=0), "nope_every=0"),
    (lambda: Rope(scaling=4.0), "scaling=4.0"),
    (lambda: Rope(proportional=None), "proportional=None"),
    (lambda: YaRN(beta_fast=1, beta_slow=32), "beta_fast=1", "beta_slow=32"),
    (lambda: YaRN(attention_factor=NAN), "attention_factor=nan"),
    (lambda: YaRN(original_length=0), "original_length=0"),
    (lambda: Llama3(low=4, high=1), "high=1", "low=4"),
    (lambda: NTK(factor=-2), "factor=-2"),
    (lambda: Interpolation(factor="4"), "factor='4'"),
    (lambda: ModernDecoder(512), "cfg=512"),
    (lambda: KVCache(capacity=0), "capacity=0"),
    (lambda: RollingCache(0), "window=0"),
    (lambda: causal_mask(3, 2), "S=2", "T=3"),
    (lambda: causal_mask(3, window=-1), "window=-1"),
    (lambda: apply_rope(torch.ones(3, 4), torch.ones(2, 2), torch.ones(2, 2)), "cos", "2 rows"),
    (lambda: apply_rope(torch.ones(2, 4), torch.ones(2, 4), torch.ones(2, 4)), "cos", "4 columns"),
    (lambda: apply_rope(torch.ones(1, 4), torch.ones(1, 2), torch.ones(1, 2), "x"), "pairing='x'"),
    (lambda: route(torch.ones(1, 3), 4), "k=4", "E=3"),
    (lambda: expert_capacity(0, 4, 2), "tokens=0"),
    (lambda: expert_capacity(4, 4, 2, NAN), "factor=nan"),
    (lambda: left_pad([]), "rows=[]"),
    (lambda: next_token_probabilities(numbers(NAN, 1)), "logits", "nan"),
    (lambda: next_token_probabilities(numbers(-INF, -INF)), "logits", "-inf"),
    (lambda: load("no/such.safetensors"), "path='no/such.safetensors'"),
]


@pytest.mark.parametrize("entry", CONFIGS, ids=lambda entry: entry[1])
def test_a_bad_config_is_refused(entry):
    refused(*entry)


def refused(call, *named):
    """Assert that `call` raises ValueError naming every text, a rule and a way out."""
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    for text in named:
        assert text in message, message
    assert re.search(r"[.)] \S.+", message) and message.endswith("."), message


@functools.cache
def world():
    """A model, caches that hold 4 tokens of 2 rows, an optimizer with some history."""
    model = jittered(small())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    training_step(model, optimizer, torch.arange(8).view(2, 4))
    caches = new_caches(model, capacity=10)
    with torch.no_grad():
        model(torch.arange(8).view(2, 4), caches)
    return SimpleNamespace(model=model, caches=caches, optimizer=optimizer)


def snapshot(w):
    """Everything that a refused call must leave as it was."""
    tensors = [t.clone() for t in w.model.state_dict().values()]
    tensors += [t.clone() for cache in w.caches for t in cache.held()]
    for state in w.optimizer.state.values():
        tensors += [t.clone() for t in state.values()]
    return tensors + [torch.get_rng_state()], [(c.length, c.real) for c in w.caches]


IDS = torch.tensor([[1, 2], [3, 4]])
MASK = torch.ones(2, 6, dtype=torch.bool)


def step(w, ids=IDS, **how):
    return training_step(w.model, w.optimizer, ids, **how)


def poisoned(w):
    """A step whose loss is NaN: the head is asked about an infinite weight for a moment."""
    kept = w.model.norm_f.weight.data.clone()
    w.model.norm_f.weight.data.fill_(INF)
    try:
        return step(w)
    finally:
        w.model.norm_f.weight.data.copy_(kept)


class Steep(torch.nn.Module):
    """A model of finite loss and infinite gradient."""

    def __init__(self):
        super().__init__()
        self.x, self.blocks = torch.nn.Parameter(torch.zeros(1)), []

    def forward(self, ids):
        return (self.x.sqrt() * torch.arange(5)).expand(*ids.shape, 5), []


def full(w):
    return w.model(torch.zeros(2, 7, dtype=torch.long), w.caches, 4)


CALLS = [
    (lambda w: w.model([[1, 2]]), "ids=list"),
    (lambda w: w.model(torch.tensor([1, 2])), "ids=(2,)"),
    (lambda w: w.model(torch.ones(1, 2)), "ids=(1, 2)", "float32"),
    (lambda w: w.model(torch.empty(1, 0, dtype=torch.long)), "ids=(1, 0)"),
    (lambda w: w.model(torch.tensor([[0, 41]])), "ids", "41", "vocab_size=41"),
    (lambda w: w.model(torch.tensor([[-1, 4]])), "ids", "-1", "vocab_size=41"),
    (lambda w: w.model(torch.zeros(1, 41, dtype=torch.long)), "T=41", "max_seq_len=40"),
    (lambda w: w.model(IDS, pos_offset=39), "pos_offset=39", "max_seq_len=40"),
    (lambda w: w.model(IDS, pos_offset=-1), "pos_offset=-1"),
    (lambda w: w.model(IDS, pos_offset=2.0), "pos_offset=2.0"),
    (lambda w: w.model(IDS, w.caches, 0), "pos_offset=0", "pos_offset=4"),
    (lambda w: w.model(IDS, w.caches, 5), "pos_offset=5"),
    (lambda w: w.model(IDS, w.caches[:2], 4), "caches=2", "n_layers=3"),
    (lambda w: w.model(IDS, w.caches[0], 4), "caches=", "n_layers=3"),
    (lambda w: w.model(IDS, [], 0), "caches=0", "n_layers=3"),
    (lambda w: w.model(IDS, [None] * 3), "caches", "None"),
    (lambda w: w.model(IDS, [KVCache()] * 3), "caches=3", "1 different"),
    (lambda w: w.model(IDS, [*w.caches[:2], KVCache()], 4), "caches", "[0, 4]"),
    (lambda w: w.model(IDS[:1], w.caches, 4), "ids has 1", "[2]"),
    (lambda w: full(w), "capacity=10", "7"),
    (lambda w: w.model(IDS, [RollingCache(3) for _ in range(3)]), "last 3", "window=None"),
    (lambda w: w.model(IDS, w.caches, 4, MASK[:, :5]), "attention_mask=(2, 5)", "6"),
    (lambda w: w.model(IDS, w.caches, 4, MASK & (torch.arange(6) > 0)), "attention_mask", "P=4"),
    (lambda w: w.model(IDS, attention_mask=MASK[:, :2].float()), "attention_mask=torch.float32"),
    (lambda w: w.model(IDS, attention_mask=[[1, 1], [1, 1]]), "attention_mask=()"),
    (
        lambda w: w.model(IDS.repeat(1, 1), [KVCache(spec={"k": (9, 9)}) for _ in range(3)]),
        "(9, 9)",
    ),
    (
        lambda w: w.model(IDS, [*new_caches(w.model)[:2], KVCache(spec={"k": (7, 9)})]),
        "(7, 9)",
        "(2, 8)",
    ),
    (lambda w: w.caches[0].update(torch.ones(2, 1, 1, 8), torch.ones(2, 1, 1, 8)), "(1, 8)"),
    (lambda w: w.caches[0].update(*(torch.ones(2, 2, n, 8) for n in (1, 2))), "[1, 2] tokens"),
    (lambda w: w.caches[0].update(*[torch.ones(3, 2, 1, 8)] * 2), "(3, 2, 8)", "(2, 2, 8)"),
    (lambda w: w.caches[0].trim(5), "n=5", "4 tokens"),
    (lambda w: w.caches[0].trim(-1), "n=-1"),
    (lambda w: w.caches[0].reorder(torch.tensor([0, 2])), "rows=", "[0, 2]"),
    (lambda w: generate(w.model, torch.empty(1, 0, dtype=torch.long)), "prompt_ids", "(1, 0)"),
    (lambda w: generate(w.model, [1, 2, 3]), "prompt_ids=[1, 2, 3]"),
    (lambda w: generate(w.model, "the cat"), "prompt_ids='the cat'"),
    (lambda w: generate(w.model, [[1], []]), "rows=[[1], []]"),
    (lambda w: generate(w.model, [[1, 41]]), "ids", "41", "vocab_size=41"),
    (lambda w: generate(w.model, [[1]], -1), "max_new_tokens=-1"),
    (lambda w: generate(w.model, [[1]], 2.5), "max_new_tokens=2.5"),
    (lambda w: generate(w.model, [[1]], 41), "max_new_tokens=41", "max_seq_len=40", "at most 40"),
    (lambda w: generate(w.model, [[1]], temperature=NAN), "temperature=nan"),
    (lambda w: generate(w.model, [[1]], temperature=-1), "temperature=-1"),
    (lambda w: generate(w.model, [[1]], temperature="hot"), "temperature='hot'"),
    (lambda w: generate(w.model, [[1]], top_k=0), "top_k=0"),
    (lambda w: generate(w.model, [[1]], top_p=0.0), "top_p=0.0"),
    (lambda w: generate(w.model, [[1]], top_p=1.5), "top_p=1.5"),
    (lambda w: generate(w.model, [[1]], min_p=-0.1), "min_p=-0.1"),
    (lambda w: generate(w.model, [[1]], eos_id=41), "eos_id=41", "vocab_size=41"),
    (lambda w: generate(w.model, [[1]], eos_id=1.5), "eos_id=1.5"),
    (lambda w: generate(w.model, [[1]], pad_id=-1), "pad_id=-1"),
    (lambda w: generate(w.model, [[1]], seed=-1), "seed=-1"),
    (lambda w: generate(w.model, IDS, attention_mask=MASK), "attention_mask=(2, 6)"),
    (lambda w: generate(w.model, [[1]], attention_mask=MASK), "attention_mask="),
    (
        lambda w: generate(w.model, IDS, attention_mask=torch.tensor([[1, 0], [1, 1]])),
        "attention_mask=False",
        "right",
    ),
    (lambda w: step(w, IDS[:, :1]), "ids=(2, 1)", "T at least 2"),
    (lambda w: step(w, targets=IDS + 40), "41 logits"),
    (lambda w: step(w, targets=IDS[:, :1]), "ids=(2, 1)"),
    (lambda w: step(w, alpha=-0.1), "alpha=-0.1"),
    (lambda w: step(w, alpha=NAN), "alpha=nan"),
    (lambda w: step(w, max_norm=0), "max_norm=0"),
    (lambda w: step(w, max_norm=-1.0), "max_norm=-1.0"),
    (poisoned, "loss=nan"),
    (lambda w: next_token_loss(torch.zeros(1, 3, 5), torch.zeros(1, 4).long()), "logits=(1, 3, 5)"),
    (lambda w: load_balancing_loss(torch.ones(2, 3), IDS, 5, alpha=-1), "alpha=-1"),
    (lambda w: w.model.load_state_dict(jittered(small(tied=False)).state_dict()), "tied=True"),
]


@pytest.mark.parametrize("entry", CALLS, ids=lambda entry: entry[1])
def test_a_bad_call_is_refused_and_changes_nothing(entry):
    call, *named = entry
    w = world()
    tensors, states = snapshot(w)
    refused(lambda: call(w), *named)
    after, states_after = snapshot(w)
    assert states_after == states
    for ours, theirs in zip(after, tensors, strict=True):
        assert torch.equal(ours, theirs)
    # the world still works
    with torch.no_grad():
        w.model(IDS, w.caches, 4)
    for cache in w.caches:
        cache.trim(2)


def test_a_step_of_infinite_gradient_moves_no_weight():
    model = Steep()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    refused(lambda: training_step(model, optimizer, IDS), "grad_norm=")
    assert model.x.item() == 0.0


def test_a_rolling_cache_cannot_be_trimmed_into_what_it_forgot():
    cache = RollingCache(2)
    cache.update(torch.ones(1, 1, 3, 1), torch.ones(1, 1, 3, 1))
    refused(lambda: cache.trim(1), "n=1", "window of 2")
    assert cache.length == 3
