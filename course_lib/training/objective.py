"""What training minimises: the loss of the next token, and the balance of the experts."""

import torch
import torch.nn.functional as F
from torch import Tensor

from course_lib.model.checks import is_number, require

IGNORED = -100
ALPHA = 0.01  # weight of the balance loss beside the loss of the next token


def check_targets(logits: Tensor, ids: Tensor, ignore_index: int):
    require(
        logits.shape[:2] == ids.shape and ids.shape[1] > 1,
        f"logits={tuple(logits.shape)} and ids={tuple(ids.shape)} leave nothing to predict.",
        "Give logits (B, T, V) and ids (B, T) of the same tokens, T at least 2.",
    )
    V = logits.shape[-1]
    outside = ids[(ids != ignore_index) & ((ids < 0) | (ids >= V))].tolist()
    require(
        not outside,
        f"ids holds the target {outside[:1]}, outside the {V} logits of a position.",
        f"Targets are ids from 0 to {V - 1}, or ignore_index={ignore_index}.",
    )


def next_token_loss(logits: Tensor, ids: Tensor, ignore_index: int = IGNORED) -> Tensor:
    """Mean of -ln p(ids[t + 1] | ids[.. t]) in nats a token: logits (B, T, V), ids (B, T).

    The shift happens here and nowhere else. Tokens equal to ignore_index do not count;
    without any that counts the loss is 0, not NaN. Raises ValueError for shapes that do
    not fit and ids outside the vocabulary. Module 13."""
    check_targets(logits, ids, ignore_index)
    predicted, targets = logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
    total = F.cross_entropy(predicted, targets, ignore_index=ignore_index, reduction="sum")
    return total / (targets != ignore_index).sum().clamp(min=1)


def load_balancing_loss(
    router_logits: Tensor,
    topk_idx: Tensor,
    n_experts: int,
    alpha: float = ALPHA,
    divide_by_k: bool = False,
    real: Tensor | None = None,
) -> Tensor:
    """alpha * E * sum_e f_e P_e for one layer: router_logits (N, E), topk_idx (N, k).

    f_e is the mean number of selections of expert e a token (they sum to k), P_e the mean
    of the full softmax; the gradient flows through P alone. Uniform routing gives alpha k,
    or alpha with divide_by_k: two conventions in use. real (N,) leaves padding out.
    Raises ValueError for a negative alpha.
    Source: Fedus et al., arXiv 2101.03961, equations 4-6. Module 12."""
    require(
        is_number(alpha) and alpha >= 0,
        f"alpha={alpha!r} is no weight of a loss.",
        "Give a finite number of at least 0; 0.01 is usual.",
    )
    N = topk_idx.shape[0]
    keep = topk_idx.new_ones(N, dtype=torch.bool) if real is None else real.bool()
    count = keep.sum().clamp(min=1)
    chosen = F.one_hot(topk_idx, n_experts).sum(1)  # (N, E): 1 where chosen
    f = (chosen * keep.unsqueeze(-1)).sum(0) / count
    P = (router_logits.float().softmax(-1) * keep.unsqueeze(-1)).sum(0) / count
    loss = alpha * n_experts * (f * P).sum()
    return loss / topk_idx.shape[-1] if divide_by_k else loss


def balance_loss(
    model, router_logits: list[Tensor], alpha: float = ALPHA, real: Tensor | None = None
) -> Tensor:
    """The sum of load_balancing_loss over the MoE layers, each by itself: joined, one
    layer's crowding could cancel another's. Zero for a dense model. Module 12."""
    layers = [block.ffn for block in model.blocks if block.is_moe]
    real = None if real is None else real.flatten()
    losses = [
        load_balancing_loss(logits, moe.route(logits)[1], len(moe.experts), alpha, real=real)
        for moe, logits in zip(layers, router_logits, strict=True)
    ]
    return torch.stack(losses).sum() if losses else torch.zeros(())
