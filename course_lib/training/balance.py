"""Balance without a loss: a bias that steers the choice of experts towards those with less load."""

import torch
from torch import Tensor

from course_lib.model.checks import is_number, require
from course_lib.model.moe import MoE


@torch.no_grad()
def update_selection_bias(moe: MoE, chosen: Tensor, gamma: float = 0.001) -> Tensor:
    """b_e += gamma * sign(mean load - load_e), from the (N, k) experts just chosen; returns b (E,).

    Not gradient descent: no loss knows of b, and the weights of the experts stay without it.
    Raises ValueError for a layer without selection bias and for a gamma that is not above 0.
    Source: Wang et al., arXiv 2408.15664, algorithm 1. Module 12."""
    require(
        moe.selection_bias is not None,
        "router=Router(selection_bias=False) has no bias to move.",
        "Build the layer with Router(..., selection_bias=True).",
    )
    require(
        is_number(gamma) and gamma > 0,
        f"gamma={gamma!r} is no step.",
        "Give a number above 0; 0.001 is usual.",
    )
    load = chosen.flatten().bincount(minlength=len(moe.experts)).float()
    moe.selection_bias += gamma * (load.mean() - load).sign()
    return moe.selection_bias
