"""From the logits of one position to the next token. Knows nothing of models or text."""

import torch
from torch import Tensor

from course_lib.model.checks import is_number, is_whole, require

TINY = torch.finfo(torch.float32).tiny  # below it float32 divides by 0


def check_sampling(temperature, top_k=None, top_p=None, min_p=None):
    """Raise ValueError naming the argument that no distribution can be made with."""
    require(
        is_number(temperature) and temperature >= 0,
        f"temperature={temperature!r} is not a finite number of at least 0.",
        "0 takes the likeliest token, 1 the model's own distribution; 0.8 is usual.",
    )
    require(
        top_k is None or is_whole(top_k, least=1),
        f"top_k={top_k!r} is not a number of tokens.",
        "Give an int above 0, or None to keep all.",
    )
    require(
        top_p is None or (is_number(top_p) and 0 < top_p <= 1),
        f"top_p={top_p!r} is not a probability above 0.",
        "Give a number above 0 and at most 1, for example 0.9, or None.",
    )
    require(
        min_p is None or (is_number(min_p) and 0 <= min_p <= 1),
        f"min_p={min_p!r} is not a share of the largest probability.",
        "Give a number from 0 to 1, for example 0.05, or None.",
    )


def mask_all_but(logits: Tensor, kept: Tensor) -> Tensor:
    return logits.masked_fill(~kept, -torch.inf)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """-inf for all but the k largest of the last axis (all, if k exceeds it). Module 14."""
    k = min(k, logits.shape[-1])
    kept = logits.topk(k, dim=-1).indices  # by index: exactly k also among equals
    nothing = torch.zeros_like(logits, dtype=torch.bool)
    return mask_all_but(logits, nothing.scatter(-1, kept, True))


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of most likely tokens whose probability reaches p.

    Source: Holtzman et al., arXiv 1904.09751, section 3.1. Module 14."""
    order = logits.argsort(dim=-1, descending=True, stable=True)
    probs = logits.softmax(-1).gather(-1, order)
    before = probs.cumsum(-1) - probs  # mass of the more likely ones: 0 for the first
    kept_sorted = (before < p) if p < 1 else torch.ones_like(before, dtype=torch.bool)
    kept = torch.zeros_like(kept_sorted).scatter(-1, order, kept_sorted)
    return mask_all_but(logits, kept)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Keep tokens at least p times as likely as the likeliest.

    Source: Nguyen et al., arXiv 2407.01082, section 3. Module 14."""
    probs = logits.softmax(-1)
    return mask_all_but(logits, probs >= p * probs.amax(-1, keepdim=True))


def next_token_probabilities(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """The distribution that `sample` draws from: (..., V) logits to (..., V) probabilities.

    softmax(logits / temperature) after top-k, then top-p, then min-p have removed tokens;
    temperature 0 puts all on the largest logit. Raises ValueError for arguments out of
    range and for logits that hold NaN or +inf, or only -inf. Module 14."""
    check_sampling(temperature, top_k, top_p, min_p)
    logits = logits.float()
    largest = logits.amax(-1, keepdim=True)
    require(
        bool(largest.isfinite().all()),
        f"logits with a largest value of {largest.flatten().tolist()} give no distribution.",
        "They must hold a finite value, and neither NaN nor +inf: look at the weights.",
    )
    if temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits).scatter(-1, best, 1.0)
    # the largest becomes 0 first, so that no temperature is small enough to give inf - inf
    logits = (logits - largest) / max(temperature, TINY)
    if top_k is not None:
        logits = keep_top_k(logits, top_k)
    if top_p is not None:
        logits = keep_top_p(logits, top_p)
    if min_p is not None:
        logits = keep_min_p(logits, min_p)
    return logits.softmax(-1)


def sample(logits: Tensor, temperature: float = 1.0, generator=None, **filters) -> Tensor:
    """Draw one token a row: (B, V) logits to (B,) ids; temperature 0 draws nothing.

    Filters as in next_token_probabilities. Raises ValueError. Module 14."""
    probs = next_token_probabilities(logits, temperature, **filters)
    if temperature == 0:
        return probs.argmax(-1)
    return torch.multinomial(probs, 1, generator=generator).squeeze(-1)
