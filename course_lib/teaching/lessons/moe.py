"""Module 12's own computations: drawn choices, a router in numpy, SmolLM2 cut to experts."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.model import ModernDecoder, SwiGLU
from course_lib.model.checks import divisors, require
from course_lib.model.moe import combine_loop

# --- loads ----------------------------------------------------------------------------------


def draw_choices(tokens: int, experts: int, k: int, skew: float = 0.0, seed: int = 0) -> Tensor:
    """k different experts for each token, drawn independently: indices (N, k).

    ln of an expert's odds is normal with standard deviation `skew`; 0 makes all alike.
    Gumbel noise and top-k draw without replacement (arXiv 1903.06059). Module 12."""
    require(k <= experts, f"k={k} exceeds E={experts} experts.", f"Choose 1 to {experts}.")
    draw = torch.Generator().manual_seed(seed)
    noise = -torch.empty(tokens, experts).exponential_(generator=draw).log()
    odds = skew * torch.randn(experts, generator=draw)
    return (odds + noise).topk(k, dim=-1).indices


def load_of(chosen: Tensor, experts: int) -> Tensor:
    """Slots of each expert: (N, k) to (E,). Module 12."""
    return chosen.flatten().bincount(minlength=experts)


def dropped_share(load: Tensor, capacity: int) -> float:
    """Share of the slots that find no place when each expert has `capacity`. Module 12."""
    return ((load - capacity).clamp(min=0).sum() / load.sum()).item()


def evenness(load: Sequence[float] | Tensor) -> float:
    """Entropy of the load over ln E: 1 is even, 0 is one expert for all. Module 12."""
    share = torch.as_tensor(load).double()
    share = share[share > 0] / share.sum()
    return (-(share * share.log()).sum() / math.log(len(load))).item()


def spread_if_independent(tokens: int, experts: int, k: int) -> tuple[float, float]:
    """Mean and standard deviation of an expert's load if tokens chose by chance. Module 12."""
    p = k / experts
    return tokens * p, math.sqrt(tokens * p * (1 - p))


# --- a router that learns, small enough to train while one moves a slider ---------------------

D, EXPERTS, CLUSTERS, BATCH = 8, 8, 16, 64
LEARNING_RATE, BETA1, BETA2 = 0.01, 0.9, 0.99


def toy_task(steps: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Batches of tokens from 16 clusters, each with a linear map of its own: x and y (steps, N, D).

    Channel 0 of x is 1, so that the router has a bias. Module 12."""
    draw = np.random.default_rng(seed)
    centres = draw.standard_normal((CLUSTERS, D)).astype(np.float32)
    maps = draw.standard_normal((CLUSTERS, D, D)).astype(np.float32) / math.sqrt(D)
    cluster = draw.integers(CLUSTERS, size=(steps, BATCH))
    x = centres[cluster] + 0.5 * draw.standard_normal((steps, BATCH, D)).astype(np.float32)
    x[..., 0] = 1
    y = (x[..., None, :] @ maps[cluster])[..., 0, :]
    return x, y


def softmax(z: np.ndarray) -> np.ndarray:
    exp = np.exp(z - z.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def toy_gradients(x, y, gate, experts, bias, alpha: float, k: int = 2):
    """One step of the toy: loss, load (E,) and the gradients of gate (D, E) and experts (D, E D).

    Sigmoid scores s; the k of largest s + bias are chosen and weigh s / sum of the chosen s.
    The loss is the mean square error plus alpha * E * sum of f P, as `load_balancing_loss`."""
    logits = x @ gate
    scores = 1 / (1 + np.exp(-logits))
    order = np.argpartition(scores + bias, -k, axis=-1)[:, -k:]
    mask = np.zeros_like(scores)
    np.put_along_axis(mask, order, 1, axis=-1)
    total = (scores * mask).sum(-1, keepdims=True)
    weights = scores * mask / total
    ran = (x @ experts).reshape(len(x), EXPERTS, D)  # every expert: at this size the shortest way
    error = (weights[:, None] @ ran)[:, 0] - y
    slope = 2 * error / error.size  # d loss / d output
    to_weight = (ran @ slope[..., None])[..., 0]
    to_score = mask * (to_weight - (weights * to_weight).sum(-1, keepdims=True)) / total
    to_logit = to_score * scores * (1 - scores)
    p, f = softmax(logits), mask.mean(0)
    to_logit += alpha * EXPERTS / len(x) * p * (f - (p * f).sum(-1, keepdims=True))
    to_experts = x.T @ (weights[..., None] * slope[:, None]).reshape(len(x), -1)
    balance = alpha * EXPERTS * (f * p.mean(0)).sum()
    return (error**2).mean(), balance, f * len(x), x.T @ to_logit, to_experts


def toy_run(alpha: float, gamma: float, start: float, steps: int = 120, seed: int = 0) -> dict:
    """Train the toy's router and experts with Adam; loads (steps, E) and errors (steps,).

    The router prefers expert 0 by `start` at first. alpha weighs the balance loss, gamma moves
    the selection bias against the load. Module 12."""
    xs, ys = toy_task(steps, seed)
    draw = np.random.default_rng(seed + 1)
    gate = 0.1 * draw.standard_normal((D, EXPERTS)).astype(np.float32)
    gate[0, 0] += start
    experts = draw.standard_normal((D, EXPERTS * D)).astype(np.float32) / math.sqrt(D)
    weights, bias = [gate, experts], np.zeros(EXPERTS, np.float32)
    means, squares = ([np.zeros_like(w) for w in weights] for _ in range(2))
    loads, errors = np.zeros((steps, EXPERTS)), np.zeros(steps)
    for step, (x, y) in enumerate(zip(xs, ys, strict=True), 1):
        errors[step - 1], _, load, *grads = toy_gradients(x, y, *weights, bias, alpha)
        loads[step - 1] = load
        bias += gamma * np.sign(load.mean() - load)
        size = LEARNING_RATE * math.sqrt(1 - BETA2**step) / (1 - BETA1**step)
        for w, g, m, s in zip(weights, grads, means, squares, strict=True):
            m += (1 - BETA1) * (g - m)
            s += (1 - BETA2) * (g * g - s)
            w -= size * m / (np.sqrt(s) + 1e-8)
    return {"loads": loads, "errors": errors, "bias": bias}


# --- mistakes ---------------------------------------------------------------------------------


def concatenated(experts: nn.ModuleList, flat: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Wrong: results stay in the order in which the experts ran. Module 12."""
    parts = []
    for e, expert in enumerate(experts):
        token, slot = torch.where(chosen == e)
        parts.append(weights[token, slot, None] * expert(flat[token]))
    return torch.cat(parts).view(*chosen.shape, -1).sum(1)


def overwritten(experts: nn.ModuleList, flat: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Wrong: out[token] += ... keeps one of a token's k results. Module 12."""
    token = torch.arange(len(flat)).repeat_interleave(chosen.shape[-1])
    ran = torch.stack(
        [experts[e](flat[t]) for t, e in zip(token, chosen.flatten().tolist(), strict=True)]
    )
    out = torch.zeros_like(flat)
    out[token] += weights.flatten().unsqueeze(-1) * ran
    return out


def within_capacity(experts, flat, weights, chosen, kept: Tensor) -> Tensor:
    """The sum over the slots that found a place, kept (N, k). Module 12."""
    return combine_loop(experts, flat, weights * kept, chosen)


# --- a dense layer, cut into experts ----------------------------------------------------------


def expert_parts(ffn: SwiGLU, experts: int) -> Tensor:
    """Gram matrices (E, F, F) of w_down, cut into E experts of neighbouring hidden units."""
    width = ffn.w_down.in_features
    require(
        width % experts == 0,
        f"E={experts} does not divide the {width} hidden units.",
        f"Choose from {divisors(width)}.",
    )
    columns = ffn.w_down.weight.unflatten(1, (experts, -1))  # (D, E, F)
    return torch.einsum("dea,deb->eab", columns, columns)


def contributions(ffn: SwiGLU, hidden: Tensor, experts: int) -> Tensor:
    """Length of what each expert adds to the output: hidden (N, E F) to (N, E). Module 12."""
    parts = expert_parts(ffn, experts)
    cut = hidden.unflatten(-1, (experts, -1))
    squares = torch.einsum("nea,eab,neb->ne", cut, parts, cut)
    return squares.clamp(min=0).sqrt()


def chosen_mask(lengths: Tensor, k: int, choice: str) -> Tensor:
    """Which k of E experts run for each token, by the length of their contributions (N, E).

    "largest": an oracle's choice for each token; "fixed": the same k for all tokens, those
    largest on average; "random": k drawn for each token. Module 12."""
    if choice == "largest":
        ranked = lengths
    elif choice == "fixed":
        ranked = lengths.mean(0, keepdim=True).expand_as(lengths)
    elif choice == "random":
        ranked = torch.rand(lengths.shape, generator=torch.Generator().manual_seed(0))
    else:
        raise ValueError(f"choice={choice!r} is unknown. Use 'largest', 'fixed' or 'random'.")
    return torch.zeros_like(lengths).scatter(-1, ranked.topk(k, dim=-1).indices, 1)


class TopKOfSwiGLU(nn.Module):
    """A dense SwiGLU cut into E experts, of which k run for each token, all with weight 1.

    With k = E it is the dense layer. Module 12."""

    def __init__(self, ffn: SwiGLU, experts: int, k: int, choice: str = "largest"):
        super().__init__()
        self.ffn, self.experts, self.k, self.choice = ffn, experts, k, choice

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.ffn.w_gate(x)) * self.ffn.w_up(x)
        flat = hidden.flatten(0, -2)
        lengths = contributions(self.ffn, flat, self.experts)
        mask = chosen_mask(lengths, self.k, self.choice)
        kept = flat.unflatten(-1, (self.experts, -1)) * mask.unsqueeze(-1)
        return self.ffn.w_down(kept.flatten(-2)).view_as(x)


@contextmanager
def cut_into_experts(
    model: ModernDecoder, layers: Sequence[int], experts: int, k: int, choice: str = "largest"
) -> Iterator[ModernDecoder]:
    """The model with those dense layers cut into experts, until the block is left. Module 12."""
    dense = {i: model.blocks[i].ffn for i in layers}
    try:
        for i, ffn in dense.items():
            model.blocks[i].ffn = TopKOfSwiGLU(ffn, experts, k, choice)
        yield model
    finally:
        for i, ffn in dense.items():
            model.blocks[i].ffn = ffn
