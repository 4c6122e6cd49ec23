"""The forward pass of whole sequences, and its backward, as compiled programs.

`torch.compile` fuses what stands between the matrix products; forward and backward are one graph
each. The experts are opaque to it: how many tokens each gets is known at run time only, so the
products of all experts are one operation that the compiler calls and does not look into.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from course_lib.model.checks import check_compiler, require
from course_lib.model.grouped import expert_products, expert_products_backward
from course_lib.model.inputs import check_ids


@torch.library.custom_op("course_lib::expert_products", mutates_args=())
def products(rows: Tensor, counts: Tensor, weights: list[Tensor]) -> Tensor:
    return expert_products(rows, counts.tolist(), weights)


@products.register_fake
def _(rows, counts, weights):
    return rows.new_empty(rows.shape[0], weights[0].shape[0])


@torch.library.custom_op("course_lib::expert_products_backward", mutates_args=())
def products_backward(
    grad: Tensor, rows: Tensor, counts: Tensor, weights: list[Tensor]
) -> list[Tensor]:
    by_rows, by_weights = expert_products_backward(grad, rows, counts.tolist(), weights)
    return [by_rows, *by_weights]


@products_backward.register_fake
def _(grad, rows, counts, weights):
    return [torch.empty_like(rows), *(torch.empty_like(W) for W in weights)]


def save_inputs(ctx, inputs, output):
    rows, counts, weights = inputs
    ctx.save_for_backward(rows, counts, *weights)


def differentiate(ctx, grad):
    rows, counts, *weights = ctx.saved_tensors
    by_rows, *by_weights = products_backward(grad.contiguous(), rows, counts, weights)
    return by_rows, None, by_weights


products.register_autograd(differentiate, setup_context=save_inputs)


def moe_forward(moe, x: Tensor) -> tuple[Tensor, Tensor]:
    """`MoE.forward` with the experts' products as opaque operations."""
    flat = x.flatten(0, -2)
    router_logits = moe.gate(flat)
    weights, chosen = moe.route(router_logits)
    expert, order = chosen.flatten().sort(stable=True)
    token = order // chosen.shape[-1]
    counts = (expert == torch.arange(len(moe.experts)).unsqueeze(-1)).sum(-1)

    def product(x, name):
        return products(x, counts, [getattr(expert, name).weight for expert in moe.experts])

    rows = flat[token]
    inner = F.silu(product(rows, "w_gate")) * product(rows, "w_up")
    weighted = weights.to(x.dtype).flatten()[order].unsqueeze(-1) * product(inner, "w_down")
    out = torch.zeros_like(flat).index_add(0, token, weighted)
    for shared in moe.shared:
        out = out + shared(flat)
    return out.view_as(x), router_logits


def compile_forward(model):
    """`model(ids)` as a compiled function, with its gradient: ids (B, T) to logits (B, T, V) and
    the router logits. Pass it as `training_step(..., forward=compiled)`.

    The first call of each shape (B, T) compiles, for half a minute or so; the weights are the
    model's own. Raises ValueError where no C++ compiler is installed. Module 13."""
    check_compiler("compile_forward")

    def forward(ids, cos, sin):
        x, router_logits = model.embed(ids), []
        for block in model.blocks:
            x = x + block.attn(block.norm1(x), cos, sin)
            if block.is_moe:
                out, logits = moe_forward(block.ffn, block.norm2(x))
                router_logits.append(logits)
            else:
                out = block.ffn(block.norm2(x))
            x = x + out
        return model.lm_head(model.norm_f(x)), router_logits

    program = torch.compile(forward, fullgraph=True, dynamic=False, isolate_recompiles=True)

    def compiled(ids):
        check_ids(ids, model.cfg)
        T, limit = ids.shape[1], model.cfg.max_seq_len
        require(T <= limit, f"T={T} exceeds max_seq_len={limit}.", f"Give at most {limit} tokens.")
        return program(ids, *model.rope(torch.arange(T)))

    return compiled
