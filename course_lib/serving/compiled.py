"""Decoding and prompts as compiled programs: what `compile_decode` makes of the fast form.

At batch 1 a step is some 130 operations of about a microsecond each, beside reading the weights
once. `torch.compile` writes C++ for all of it, so that nothing is dispatched in between. Three
things must be said differently for it:

1. Shapes never change: attention runs over the whole capacity, masked behind the newest token.
2. Experts are chosen by indexing a stack (E, out, in), not by a number in Python.
3. At batch 1 a product is a multiplication and a sum, which melts into the loops around it; for
   more rows it is a call of the matrix library, which gets its weight as it reads it fastest:
   as a right factor (in, out).

Stacks and right factors are copies, made again whenever a generation starts.

A prompt is computed by the eager form, or by a program of its own where its length was given.
Compiling takes seconds to a minute, once for each batch and capacity: `compile_seconds` tells.
"""

import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from course_lib.model.checks import check_compiler, is_whole, require
from course_lib.model.moe import route

from .fast import FastBlock, FastDecoder, FastNorm, FastSwiGLU, matrices_of, visit_sorted


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
    projections: tuple  # W_q, W_k, W_v, W_o, for `product` as the other weights
    keys: Tensor  # (B, K, h, S), the cache of FastBlock
    values: Tensor  # (B, K, S, h)
    d_head: int
    scale: float
    ffn: tuple  # gate, up, down: dense, or three stacks (E, out, in)
    shared: tuple  # one such triple for each shared expert
    routing: tuple | None  # W_gate, then k, Router and selection bias for `route`


def attend(q: Tensor, layer: Layer, unseen: Tensor) -> Tensor:
    """One query a row over the whole capacity S: q (B, H, h) to (B, H h)."""
    k, v = layer.keys.flatten(0, 1), layer.values.flatten(0, 1)
    q_rows = (q * layer.scale).view(len(k), -1, layer.d_head)  # a group's heads as rows
    scores = torch.bmm(q_rows, k).masked_fill(unseen, -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    # divided once a head, not once a key
    return (torch.bmm(weights, v) / weights.sum(-1, keepdim=True)).view(len(q), -1)


def turn(heads: Tensor, gain: Tensor | None, layer: Layer, cos: Tensor, sin: Tensor) -> Tensor:
    """QK-Norm and RoPE of heads (..., n, h)."""
    if gain is not None:
        heads = rms_norm(heads, (gain, layer.least))
    return heads * cos + heads.roll(layer.d_head // 2, -1) * sin


def project(x: Tensor, layer: Layer, cos: Tensor, sin: Tensor, product):
    """The heads q, k, v (..., n, h) of x (..., D), q and k turned."""
    # apart, and not side by side as in the eager form: a compiled operation costs nothing
    W_qkv = layer.projections[:3]
    q, k, v = (product(x, W).unflatten(-1, (-1, layer.d_head)) for W in W_qkv)
    q = turn(q, layer.gains[0], layer, cos, sin)
    return q, turn(k, layer.gains[1], layer, cos, sin), v


def attention(x: Tensor, layer: Layer, place, product) -> Tensor:
    position, cos, sin, unseen = place
    q, k, v = project(x, layer, cos, sin, product)
    # into buffers of their own: inductor copies the whole where only a part of one is written
    layer.keys.index_copy_(3, position, k.unsqueeze(3))
    layer.values.index_copy_(2, position, v.unsqueeze(2))
    return product(attend(q, layer, unseen), layer.projections[3])


def feed_forward(x: Tensor, layer: Layer, product, experts) -> Tensor:
    """x + the layer's SwiGLU, or its shared and its chosen experts, of the normed x (N, D)."""
    h = rms_norm(x, layer.norms[1])
    for shared in layer.shared:
        x = x + swiglu(h, shared, product)
    if layer.routing is None:
        return x + swiglu(h, layer.ffn, product)
    W_gate, *how = layer.routing
    weights, chosen = route(product(h, W_gate), *how)  # (N, k)
    return experts(x, h, weights.to(x.dtype), chosen, *layer.ffn)


def visit_gathered(x: Tensor, h: Tensor, weights: Tensor, chosen: Tensor, *stacks) -> Tensor:
    """x + the k chosen experts of each row h (N, D); stack[expert] is read, not copied.

    In the order of the experts, so that one is read again while it is still in the cache."""
    expert, order = chosen.flatten().sort()
    token = order // chosen.shape[1]
    gate, up, down = (stack[expert] for stack in stacks)  # (N k, out, in)
    rows = h[token].unsqueeze(1)
    inner = F.silu((gate * rows).sum(-1)) * (up * rows).sum(-1)  # (N k, F)
    inner = inner * weights.flatten()[order].unsqueeze(-1)
    out = (down * inner.unsqueeze(1)).sum(-1)
    return x + torch.zeros_like(x).index_add(0, token, out)


@torch.library.custom_op("course_lib::visit_opaque", mutates_args=())
def visit_opaque(
    x: Tensor, h: Tensor, weights: Tensor, chosen: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    """The same for many rows, as an operation that is called and not looked into: how many
    rows an expert gets is known at run time only, and compiled shapes are fixed."""
    experts = [FastSwiGLU(*matrices) for matrices in zip(gate, up, down, strict=True)]
    return visit_sorted(experts, x, h, weights, chosen)


@visit_opaque.register_fake
def _(x, *others):
    return torch.empty_like(x)


def decode_step(token: Tensor, position: Tensor, embed, head, norm_f, cos, sin, layers) -> Tensor:
    """Logits (B, V) behind one token a row, (B,), all at position (1,): what is compiled."""
    product = multiply_and_sum if token.shape[0] == 1 else torch.matmul
    unseen = torch.arange(len(cos)) > position
    place = position, cos.index_select(0, position), sin.index_select(0, position), unseen
    x = F.embedding(token, embed)
    for layer in layers:
        x = x + attention(rms_norm(x, layer.norms[0]), layer, place, product)
        x = feed_forward(x, layer, product, visit_gathered)
    return product(rms_norm(x, norm_f), head)


def prompt_step(ids: Tensor, embed, head, norm_f, cos, sin, layers):
    """Logits (B, V) behind a prompt (B, T), and the keys and values it leaves in each layer.

    In the last layer only the last token goes on, as in the eager form."""
    B, T = ids.shape
    product = F.linear if B == 1 else torch.matmul
    cos, sin = cos[:T], sin[:T]  # (T, 1, h)
    x, left = F.embedding(ids, embed), []
    for layer in layers:
        q, k, v = project(rms_norm(x, layer.norms[0]), layer, cos, sin, product)
        left.append((k, v))
        if layer is layers[-1]:
            q, x = q[:, -1:], x[:, -1:]
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # (B, n, T, h)
        heads = F.scaled_dot_product_attention(
            q, k, v, is_causal=q.shape[2] == T, scale=layer.scale, enable_gqa=True
        )
        x = x + product(heads.transpose(1, 2).flatten(2), layer.projections[3])
        x = feed_forward(x.flatten(0, 1), layer, product, visit_opaque).view_as(x)
    return product(rms_norm(x[:, -1], norm_f), head), left


def as_factor(W: Tensor, batch: int) -> Tensor:
    """A weight (out, in) as `product` wants it for so many rows: (in, out), but for one row."""
    return W if batch == 1 else W.t().contiguous()


def as_layer(block, fast: FastBlock) -> Layer:
    def factors(*weights):
        return tuple(as_factor(W, fast.B) for W in weights)

    attn, ffn, routing, shared = block.attn, block.ffn, None, ()
    gains, least = (None, None), None
    if isinstance(fast.qk_norm, FastNorm):
        gains, least = fast.qk_norm.gain.split((attn.H, attn.H_kv)), fast.qk_norm.least
    if block.is_moe:
        routing = (*factors(ffn.gate.weight), ffn.top_k, ffn.router, ffn.selection_bias)
        shared = tuple(factors(*matrices_of(expert)) for expert in ffn.shared)
        triples = [matrices_of(expert) for expert in ffn.experts]
        experts = tuple(torch.stack(same) for same in zip(*triples, strict=True))
    return Layer(
        norms=tuple((n.gain, n.least) for n in (fast.norm1, fast.norm2)),
        gains=gains,
        least=least,
        projections=factors(*(W.weight for W in (attn.W_q, attn.W_k, attn.W_v, attn.W_o))),
        keys=fast.keys.zero_(),  # what is masked is still multiplied, by 0
        values=fast.values.zero_(),
        d_head=attn.d_head,
        scale=attn.core.scale,
        ffn=experts if block.is_moe else factors(*matrices_of(ffn)),
        shared=shared,
        routing=routing,
    )


def program_of(function):
    """`function` compiled for the tensors of its first call; later ones must be like them."""
    return torch.compile(
        function,
        fullgraph=True,
        dynamic=False,
        isolate_recompiles=True,  # every decoder keeps its own program
        options={
            "cpp_wrapper": True,  # also the calls between the loops are C++
            # `start` gives it tensors of the same shapes each time, and checks the rest
            "guard_filter_fn": lambda guards: [False] * len(guards),
        },
    )


class CompiledDecoder:
    """A compiled step for `batch` rows of at most `capacity` tokens of one model.

    Pass it as `generate(..., engine=compiled)`. Module 11."""

    def __init__(self, model, batch: int, capacity: int, prompt: int | None = None):
        self.model, self.batch, self.capacity, self.prompt = model, batch, capacity, prompt
        self.decode, self.read = program_of(decode_step), program_of(prompt_step)
        start = time.perf_counter()
        for length in (1,) if prompt is None else (1, prompt):
            step = self.start(model, batch, capacity)
            step(torch.zeros(batch, length, dtype=torch.long))
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
        head = as_factor(fast.head, batch)
        weights = fast.embed, head, norm_f, fast.cos, fast.sin, layers

        @torch.inference_mode()
        def step(ids: Tensor) -> Tensor:
            if ids.shape[1] > 1:
                return self.read_prompt(ids, fast, weights)
            fast.check_room(ids)
            token = ids.flatten().long().contiguous()  # what it was compiled for
            position = torch.tensor([fast.length])
            fast.length += 1
            return self.decode(token, position, *weights)

        return step

    def read_prompt(self, ids: Tensor, fast: FastDecoder, weights) -> Tensor:
        """Logits behind a prompt, whose keys and values are left in the cache."""
        T, layers = ids.shape[1], weights[-1]
        if T != self.prompt:
            return fast.step(ids)
        fast.check_room(ids)
        fast.length = T
        logits, left = self.read(ids.long().contiguous(), *weights)
        for layer, (k, v) in zip(layers, left, strict=True):  # (B, T, K, h) each
            layer.keys[..., :T] = k.permute(0, 2, 3, 1)
            layer.values[:, :, :T] = v.transpose(1, 2)
        return logits


def compile_decode(
    model, batch: int = 1, capacity: int | None = None, prompt: int | None = None
) -> CompiledDecoder:
    """Compile one decoding step of `model`: seconds to a minute, paid back token by token.

    capacity counts prompt and new tokens, max_seq_len unless given; a smaller one is faster.
    prompt is the length of those prompts that a second program reads; others run in the eager
    fast form. Raises ValueError for what has no fast form (`why_not_fast`) and where no C++
    compiler is installed. Module 11."""
    capacity = model.cfg.max_seq_len if capacity is None else capacity
    for name, value in (("batch", batch), ("capacity", capacity), ("prompt", prompt)):
        require(
            is_whole(value, least=1) or (name == "prompt" and value is None),
            f"{name}={value!r} is not a whole number of at least 1.",
            "Give an int, for example batch=1, capacity=128.",
        )
    require(
        prompt is None or 1 < prompt <= capacity,
        f"prompt={prompt!r} in capacity={capacity}.",
        f"Give a length from 2 to {capacity}, or None.",
    )
    check_compiler("compile_decode")
    return CompiledDecoder(model, batch, capacity, prompt)
