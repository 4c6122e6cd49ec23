"""Which key each query may see. Everywhere here True means "may attend"."""

import torch
from torch import Tensor

from .checks import is_whole, require


def causal_mask(
    T: int, S: int | None = None, window: int | None = None, device=None
) -> Tensor:
    """Query i of T sees key j <= S - T + i, and of these the last `window`.

    Shape (T, S), bool. S counts the cached keys too (default T): the diagonal ends in
    the lower right, where that of torch's `is_causal` starts in the upper left. A
    window counts the query's own token. Raises ValueError for S < T or window < 1.
    Source: Vaswani et al., arXiv 1706.03762, section 3.2.3. Module 08."""
    S = T if S is None else S
    require(
        S >= T, f"S={S} keys are fewer than T={T} queries.", "S counts the T new ones."
    )
    require(
        window is None or is_whole(window, least=1),
        f"window={window!r} is not a number of keys.",
        "Give an int of at least 1 (the token itself), or None.",
    )
    query = torch.arange(S - T, S, device=device).unsqueeze(1)  # its index as a key
    key = torch.arange(S, device=device)
    allowed = key <= query
    return allowed if window is None else allowed & (key > query - window)


def document_mask(documents: Tensor) -> Tensor:
    """Token i sees j <= i of its own document: ids (B, T) to (B, 1, T, T).

    Module 08."""
    same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    causal = causal_mask(documents.shape[-1], device=documents.device)
    return (same & causal).unsqueeze(1)


def positions_of(attention_mask: Tensor) -> Tensor:
    """Position of each real token, counted from the first real one of its row.

    [0, 0, 1, 1, 1] gives [0, 0, 0, 1, 2]; padding gets 0. (B, S) to (B, S).
    Module 08."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def padded_causal_mask(attention_mask: Tensor, T: int) -> Tensor:
    """Causal mask of the last T tokens without padding keys: (B, S) to (B, 1, T, S).

    A padding query may see nothing; attention gives it zeros. Module 08."""
    S = attention_mask.shape[-1]
    causal = causal_mask(T, S, device=attention_mask.device)
    real = attention_mask.bool()
    return causal & real[:, None, None, :] & real[:, None, S - T :, None]


def narrow(
    mask: Tensor | None, T: int, S: int, window: int | None, device=None
) -> Tensor | None:
    """The mask over the last S keys, cut to a sliding window; None stays "causal"."""
    if window is None:
        return mask
    band = causal_mask(T, S, window, device)
    return band if mask is None else mask[..., -S:] & band


def alibi_bias(n_heads: int, T: int, S: int, device=None) -> Tensor:
    """-slope * distance with slope 2^(-8 (h + 1) / H) for head h: (H, T, S), causal.

    Distances in tokens; future keys get -inf.
    Source: Press et al., arXiv 2108.12409, section 3. Module 05."""
    slopes = 2.0 ** (-8.0 * torch.arange(1, n_heads + 1, device=device) / n_heads)
    query = torch.arange(S - T, S, device=device).unsqueeze(1)
    distance = query - torch.arange(S, device=device)
    bias = -slopes[:, None, None] * distance
    return bias.masked_fill(distance < 0, -torch.inf)


def additive(mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What an allowed mask adds to scores: 0 where True, -inf where False.

    A mask of numbers is one already and passes unchanged. Module 08."""
    if mask.dtype != torch.bool:
        return mask
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill(~mask, -torch.inf)
