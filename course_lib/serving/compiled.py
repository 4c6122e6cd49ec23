"""One decoding step as one compiled program: what `compile_decode` makes of the fast form.

At batch 1 a step is some 130 operations of about a microsecond each, beside reading the weights
once. `torch.compile` writes C++ for all of it, so that nothing is dispatched in between. Three
things must be said differently for it:

1. Shapes never change: attention runs over the whole capacity, masked behind the newest token.
2. Experts are chosen by indexing a stack (E, out, in), not by a number in Python. The stack is
   the one copy of weights here, and it is made again whenever a generation starts.
3. At batch 1 a product is a multiplication and a sum, which melts into the loops around it; for
   more rows it stays a call of the matrix library.

Compiling takes seconds to a minute, once for each batch and capacity: `compile_seconds` tells.
"""

import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from course_lib.model.checks import is_whole, require
from course_lib.model.moe import route

from .fast import FastBlock, FastDecoder, FastNorm


def multiply_and_sum(x: Tensor, W: Tensor) -> Tensor:
    """x W^T of a single row x (1, in), as loops."""
    return (W * x).sum(-1).unsqueeze(0)


def rms_norm(x: Tensor, norm) -> Tensor:
    gain, least = norm
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + least.square()) * gain


def swiglu(x: Tensor, weights, product) -> Tensor:
    gate, up, down = weights
    return product(F.silu(product(x, gate)) * product(x, up), down)


class Layer(NamedTuple):
    """What a compiled block needs: tensors, and the numbers that are compiled in."""

    norms: tuple  # of the block's two inputs; each (gain, least) as in FastNorm
    gains: tuple  # of the query and key heads, or None twice
    least: Tensor | None
    projections: tuple  # W_q, W_k, W_v, W_o
    kv: Tensor  # (2, B, K, S, h), the cache
    d_head: int
    scale: float
    ffn: tuple  # gate, up, down: dense, or three stacks (E, out, in)
    shared: tuple  # one such triple for each shared expert
    routing: tuple | None  # W_gate, then k, Router and selection bias for `route`


def attend(q: Tensor, layer: Layer, unseen: Tensor) -> Tensor:
    """One query a row over the whole capacity S: q (B, H, h) to (B, H h)."""
    k, v = layer.kv.flatten(1, 2)  # (B K, S, h)
    q_rows = (q * layer.scale).view(len(k), -1, layer.d_head)  # a group's heads as rows
    scores = torch.bmm(q_rows, k.transpose(1, 2)).masked_fill(unseen, -torch.inf)
    return torch.bmm(scores.softmax(-1), v).view(len(q), -1)


def turn(heads: Tensor, gain: Tensor | None, layer: Layer, cos: Tensor, sin: Tensor) -> Tensor:
    """QK-Norm and RoPE of heads (B, n, h)."""
    if gain is not None:
        heads = rms_norm(heads, (gain, layer.least))
    return heads * cos + heads.roll(layer.d_head // 2, -1) * sin


def attention(x: Tensor, layer: Layer, place, product) -> Tensor:
    position, cos, sin, unseen = place
    *W_qkv, W_o = layer.projections
    # apart, and not side by side as in the eager form: a compiled operation costs nothing
    q, k, v = (product(x, W).unflatten(1, (-1, layer.d_head)) for W in W_qkv)
    q = turn(q, layer.gains[0], layer, cos, sin)
    k = turn(k, layer.gains[1], layer, cos, sin)
    # into the whole buffer: inductor copies what is only a part of one
    layer.kv.index_copy_(3, position, torch.stack((k, v)).unsqueeze(3))
    return product(attend(q, layer, unseen), W_o)


def chosen_experts(x: Tensor, layer: Layer, product) -> Tensor:
    """The k chosen experts of each row x (N, D), summed; stack[expert] is read, not copied.

    In the order of the experts, so that one is read again while it is still in the cache."""
    W_gate, *how = layer.routing
    weights, chosen = route(product(x, W_gate), *how)  # (N, k)
    expert, order = chosen.flatten().sort()
    token = order // chosen.shape[1]
    gate, up, down = (stack[expert] for stack in layer.ffn)  # (N k, out, in)
    rows = x[token].unsqueeze(1)
    inner = F.silu((gate * rows).sum(-1)) * (up * rows).sum(-1)  # (N k, F)
    inner = inner * weights.to(x.dtype).flatten()[order].unsqueeze(-1)
    out = (down * inner.unsqueeze(1)).sum(-1)
    return torch.zeros_like(x).index_add(0, token, out)


def decode_step(token: Tensor, position: Tensor, embed, head, norm_f, cos, sin, layers) -> Tensor:
    """Logits (B, V) behind one token a row, (B,), all at position (1,): what is compiled."""
    product = multiply_and_sum if token.shape[0] == 1 else F.linear
    unseen = torch.arange(len(cos)) > position
    place = position, cos.index_select(0, position), sin.index_select(0, position), unseen
    x = F.embedding(token, embed)
    for layer in layers:
        x = x + attention(rms_norm(x, layer.norms[0]), layer, place, product)
        h = rms_norm(x, layer.norms[1])
        for shared in layer.shared:
            x = x + swiglu(h, shared, product)
        if layer.routing is None:
            x = x + swiglu(h, layer.ffn, product)
        else:
            x = x + chosen_experts(h, layer, product)
    return product(rms_norm(x, norm_f), head)


def weights_of(ffn) -> tuple:
    return ffn.w_gate.weight, ffn.w_up.weight, ffn.w_down.weight


def as_layer(block, fast: FastBlock) -> Layer:
    attn, ffn, routing, shared = block.attn, block.ffn, None, ()
    gains, least = (None, None), None
    if isinstance(fast.qk_norm, FastNorm):
        gains, least = fast.qk_norm.gain.split((attn.H, attn.H_kv)), fast.qk_norm.least
    if block.is_moe:
        routing = (ffn.gate.weight, ffn.top_k, ffn.router, ffn.selection_bias)
        shared = tuple(weights_of(expert) for expert in ffn.shared)
        triples = [weights_of(expert) for expert in ffn.experts]
        experts = tuple(torch.stack(same) for same in zip(*triples, strict=True))
    return Layer(
        norms=tuple((n.gain, n.least) for n in (fast.norm1, fast.norm2)),
        gains=gains,
        least=least,
        projections=tuple(W.weight for W in (attn.W_q, attn.W_k, attn.W_v, attn.W_o)),
        kv=fast.kv.zero_(),  # what is masked is still multiplied, by 0
        d_head=attn.d_head,
        scale=attn.core.scale,
        ffn=experts if block.is_moe else weights_of(ffn),
        shared=shared,
        routing=routing,
    )


class CompiledDecoder:
    """A compiled step for `batch` rows of at most `capacity` tokens of one model.

    Pass it as `generate(..., engine=compiled)`. Prompts run in the eager fast form. Module 11."""

    def __init__(self, model, batch: int, capacity: int):
        self.model, self.batch, self.capacity = model, batch, capacity
        self.program = torch.compile(
            decode_step,
            fullgraph=True,
            dynamic=False,
            isolate_recompiles=True,  # every decoder keeps its own program
            options={
                "cpp_wrapper": True,  # also the calls between the loops are C++
                # `start` gives it tensors of the same shapes each time, and checks the rest
                "guard_filter_fn": lambda guards: [False] * len(guards),
            },
        )
        start = time.perf_counter()
        self.start(model, batch, capacity)(torch.zeros(batch, 1, dtype=torch.long))
        self.compile_seconds = time.perf_counter() - start

    @torch.inference_mode()
    def start(self, model, batch: int, capacity: int):
        """The step function of a new generation, over the weights as they are now."""
        require(
            model is self.model,
            "engine: it was compiled for another model.",
            "Call compile_decode(model, batch, capacity) for this one.",
        )
        require(
            batch == self.batch and capacity <= self.capacity,
            f"engine was compiled for batch={self.batch}, capacity={self.capacity}, but this is "
            f"batch={batch} of {capacity} tokens.",
            "Compile for the batch, and for prompt and new tokens together.",
        )
        fast = FastDecoder(model, self.batch, self.capacity)
        layers = [as_layer(block, f) for block, f in zip(model.blocks, fast.layers, strict=True)]
        norm_f = fast.norm_f.gain, fast.norm_f.least
        weights = fast.embed, fast.head, norm_f, fast.cos, fast.sin, layers

        @torch.inference_mode()
        def step(ids: Tensor) -> Tensor:
            if ids.shape[1] > 1:
                return fast.step(ids)
            fast.check_room(ids)
            token = ids.flatten().long().contiguous()  # what it was compiled for
            position = torch.tensor([fast.length])
            fast.length += 1
            return self.program(token, position, *weights)

        return step


def compile_decode(model, batch: int = 1, capacity: int | None = None) -> CompiledDecoder:
    """Compile one decoding step of `model`: seconds to a minute, paid back token by token.

    capacity counts prompt and new tokens, max_seq_len unless given; a smaller one is faster.
    Needs a C++ compiler. Raises ValueError for what has no fast form (`why_not_fast`).
    Module 11."""
    capacity = model.cfg.max_seq_len if capacity is None else capacity
    for name, value in (("batch", batch), ("capacity", capacity)):
        require(
            is_whole(value, least=1),
            f"{name}={value!r} is not a whole number of at least 1.",
            "Give an int, for example batch=1, capacity=128.",
        )
    return CompiledDecoder(model, batch, capacity)
