"""Faults people hit in training: A39, A41, A44, A45. Right values, and what each fault gives."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from course_lib import Config, ModernDecoder, RMSNorm, apply_rope, losses, next_token_loss
from course_lib.model import AttentionCore, document_mask
from course_lib.zoo.counts import numel
from tests.helpers import R, close, ids_of, jittered, small, table


def test_a39_label_shift():
    ids = torch.arange(8).unsqueeze(0)
    logits = 10.0 * F.one_hot(ids + 1, 10)  # each position knows its successor
    close(next_token_loss(logits, ids), 0.000409, atol=1e-6)
    never = F.cross_entropy(logits[0], ids[0])
    close(never, 10.000409, atol=1e-6)
    shifted_by_the_data_too = next_token_loss(logits[:, :-1], ids[:, 1:])
    close(shifted_by_the_data_too, 10.000409, atol=1e-6)


TINY = dict(vocab_size=11, d_model=4, n_layers=1, n_heads=1, n_kv_heads=1, d_head=2, n_experts=0)


def tied_pair(model):
    """Elements of embedding and head: as parameters, and as entries of the state dict."""
    pair = nn.ModuleList([model.embed, model.lm_head])
    return numel(pair), sum(t.numel() for t in pair.state_dict().values())


def test_a41_weight_tying():
    model = ModernDecoder(Config(**TINY))
    assert tied_pair(model) == (44, 88)
    plain, assigned = ModernDecoder(Config(**TINY)), ModernDecoder(Config(**TINY))
    plain.load_state_dict(model.state_dict())
    assigned.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with torch.device("meta"):
        materialised = ModernDecoder(Config(**TINY), init=None)
    materialised.to_empty(device="cpu")
    for each in (plain, copy.deepcopy(model), assigned, materialised, model.double()):
        assert each.lm_head.weight is each.embed.weight and tied_pair(each)[0] == 44


def test_a41_torch_itself_unties():
    pair = nn.ModuleList([nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)])
    pair[1].weight = pair[0].weight
    pair.load_state_dict(copy.deepcopy(pair.state_dict()), assign=True)
    assert pair[1].weight is not pair[0].weight and numel(pair) == 88


def test_a41_the_tied_gradient_is_the_sum_of_two():
    tied = jittered(small())
    loose = jittered(small(tied=False))
    loose.load_state_dict(tied.state_dict())
    for model in (tied, loose):
        sum(losses(model, ids_of(model.cfg, 2, 6))).backward()
    close(tied.embed.weight.grad, loose.embed.weight.grad + loose.lm_head.weight.grad)


def test_a44_initial_loss():
    for V, nats in ((50257, 10.824905), (256, 5.545177)):
        close(math.log(V), nats, atol=1e-6)
    draw = torch.Generator().manual_seed(0)
    hidden = RMSNorm(64)(torch.randn(4000, 64, generator=draw)).detach()
    head, targets = torch.randn(1000, 64, generator=draw), torch.arange(4000) % 1000
    close(F.cross_entropy(hidden @ head.T * 0.02, targets), 6.92, atol=0.05)
    close(F.cross_entropy(hidden @ head.T, targets), 26, atol=3)  # std 1: wrong
    cfg = Config(d_model=64, n_layers=2, n_experts=0)
    torch.manual_seed(0)
    model, ids = ModernDecoder(cfg), torch.randint(1000, (4, 64))
    targets = torch.randint(1000, (4, 64))
    with torch.no_grad():
        close(losses(model, ids, targets)[0], math.log(1000) + 64 * 0.02**2 / 2, atol=0.05)
        assert losses(ModernDecoder(cfg, init=None), ids, targets)[0] > 15


def second_document(positions, mask=None):
    core = AttentionCore(Config(n_heads=1, n_kv_heads=1, d_head=8), scale=8**-0.5)
    x = R((5, 8), 5).view(1, 1, 5, 8)
    turned = apply_rope(x, *table(8, positions))
    return core(turned, turned, x, mask)[0, 0, 3:]


def test_a45_packed_documents():
    core = AttentionCore(Config(n_heads=1, n_kv_heads=1, d_head=8), scale=8**-0.5)
    x = R((5, 8), 5)[3:].view(1, 1, 2, 8)
    turned = apply_rope(x, *table(8, [0, 1]))
    alone = core(turned, turned, x)[0, 0]
    restarted, mask = [0, 1, 2, 0, 1], document_mask(torch.tensor([[0, 0, 0, 1, 1]]))
    close((second_document(restarted) - alone).abs().max(), 0.606272, atol=1e-6)  # no isolation
    close(second_document(range(5), mask), alone, atol=1e-6)
    close(second_document(restarted, mask), alone, atol=1e-6)


def test_a45_the_last_token_of_a_document_predicts_nothing():
    ids, documents = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[0, 0, 0, 1, 1]])
    starts = documents[:, 1:] != documents[:, :-1]
    labels = ids.clone()
    labels[:, 1:][starts] = -100  # the library shifts: label t is what token t - 1 predicts
    assert labels[:, 1:].tolist() == [[6, 7, -100, 9]]
    logits = torch.randn(1, 5, 10, generator=torch.Generator().manual_seed(0))
    right = F.cross_entropy(logits[0, [0, 1, 3]], ids[0, [1, 2, 4]])
    close(next_token_loss(logits, labels), right, atol=1e-6)
    assert abs(next_token_loss(logits, ids) - right) > 1e-2
