"""All experts' products as one differentiable operation: the "grouped" form of MoE.

Equal to the loop in values and gradients. It saves what surrounds a product when
autograd sees each expert apart: an index, a copy and a graph node a projection. And
it reads each weight ahead: a sum that nobody wants runs through it as fast as memory
gives, while a product of few rows walks along several rows at once and waits at each.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def expert_products(rows: Tensor, counts: list[int], weights: list[Tensor]) -> Tensor:
    """Slice e of rows (S, in) times W_e^T, W_e (out, in), for every expert: (S, out).

    Module 12."""
    out = rows.new_empty(len(rows), weights[0].shape[0])
    parts = zip(rows.split(counts), weights, out.split(counts), strict=True)
    for x, W, y in parts:
        W.sum()  # read ahead
        torch.mm(x, W.t(), out=y)
    return out


def expert_products_backward(
    grad: Tensor, rows: Tensor, counts: list[int], weights: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of `expert_products` by rows, grad_e W_e, and weights, grad_e^T x_e.

    An expert without a row gets zeros. Module 12."""
    by_rows = torch.empty_like(rows)
    by_weights = []
    slices = (t.split(counts) for t in (grad, rows, by_rows))
    for g, x, dx, W in zip(*slices, weights, strict=True):
        W.sum()  # read ahead
        torch.mm(g, W, out=dx)
        by_weights.append(torch.mm(g.t(), x))
    return by_rows, by_weights


class ExpertProducts(torch.autograd.Function):
    """`expert_products` as autograd sees it: one node for all experts. Module 12."""

    @staticmethod
    def forward(ctx, rows, counts, *weights):
        ctx.counts = counts
        ctx.save_for_backward(rows, *weights)
        return expert_products(rows, counts, weights)

    @staticmethod
    def backward(ctx, grad):
        rows, *weights = ctx.saved_tensors
        by_rows, by_weights = expert_products_backward(
            grad.contiguous(), rows, ctx.counts, weights
        )
        return by_rows, None, *by_weights


def combine_grouped(
    experts: nn.ModuleList, flat: Tensor, weights: Tensor, chosen: Tensor
):
    """The sum of the sorted form, one operation a projection. (N, D). Module 12."""
    expert, order = chosen.flatten().sort(stable=True)
    token = order // chosen.shape[-1]
    counts = expert.bincount(minlength=len(experts)).tolist()

    def product(x, name):
        matrices = (getattr(expert, name).weight for expert in experts)
        return ExpertProducts.apply(x, counts, *matrices)

    rows = flat.index_select(0, token)
    inner = F.silu(product(rows, "w_gate")) * product(rows, "w_up")
    weighted = weights.flatten()[order].unsqueeze(-1) * product(inner, "w_down")
    return torch.zeros_like(flat).index_add(0, token, weighted)
