"""Room for tokens when each expert has a buffer of fixed size, and who is dropped."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import is_number, is_whole, require


def expert_capacity(tokens: int, experts: int, k: int, factor: float = 1.0) -> int:
    """Places of an expert: factor * tokens * k / experts, rounded up, <= `tokens`.

    Raises ValueError for a count below 1 or a factor that is not above 0.
    Source: Fedus et al., arXiv 2101.03961, equation 3. Module 12."""
    for name, count in (("tokens", tokens), ("experts", experts), ("k", k)):
        require(
            is_whole(count, least=1),
            f"{name}={count!r} is not a whole number of at least 1.",
            "Give an int above 0.",
        )
    require(
        is_number(factor) and factor > 0,
        f"factor={factor!r} is not a positive finite number.",
        "1.0 is the average demand, 1.25 is usual.",
    )
    # 1.1 * 100 / 11 is 10.000000000000002 in floating point: round before rounding up
    return min(math.ceil(round(factor * tokens * k / experts, 9)), tokens)


def keep_within_capacity(
    chosen: Tensor, n_experts: int, capacity: int, real: Tensor | None = None
) -> Tensor:
    """Which of the (N, k) chosen slots find a place, first come first served: bool.

    Tokens are served in order, each its k choices in order; padding (real (N,) False)
    takes no place and gets none. A dropped slot adds nothing: the token's other experts
    still act. Source: Lepikhin et al., arXiv 2006.16668, algorithm 1. Module 12."""
    N, k = chosen.shape
    real = torch.ones(N, dtype=torch.bool) if real is None else real.bool()
    wants = F.one_hot(chosen, n_experts).bool() & real.to(chosen.device)[:, None, None]
    wants = wants.flatten(0, 1)  # (N k, E): the queue
    place = wants.long().cumsum(0)  # 1 for the first that an expert serves
    return (wants & (place <= capacity)).any(-1).unflatten(0, (N, k))
