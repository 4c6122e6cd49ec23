"""What `ModernDecoder.forward` accepts, refused by a sentence before anything is written."""

import torch
from torch import Tensor

from .checks import require
from .config import Config


def check_ids(ids: Tensor, cfg: Config):
    is_ids = isinstance(ids, Tensor) and ids.dtype in (torch.int64, torch.int32)
    shape = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
    require(
        is_ids and ids.dim() == 2,
        f"ids={shape} of {getattr(ids, 'dtype', 'no dtype')} is not a batch of token ids.",
        "Give an integer tensor of shape (B, T), for example torch.tensor([[1, 2, 3]]).",
    )
    require(
        ids.numel() > 0, f"ids of shape {shape} is empty.", "Give at least one token."
    )
    if ids.is_meta:
        return
    low, high = int(ids.min()), int(ids.max())
    require(
        0 <= low and high < cfg.vocab_size,
        f"ids holds {high if low >= 0 else low}, outside vocab_size={cfg.vocab_size}.",
        f"Every id must be from 0 to {cfg.vocab_size - 1}.",
    )


def check_caches(caches, n_layers: int, pos_offset: int, ids: Tensor):
    require(
        isinstance(pos_offset, int) and pos_offset >= 0,
        f"pos_offset={pos_offset!r} is not a position.",
        "Give the number of tokens before these, 0 or more.",
    )
    if caches is None:
        return
    require(
        isinstance(caches, list | tuple) and len(caches) == n_layers,
        f"caches={len(caches) if hasattr(caches, '__len__') else caches!r} for "
        f"n_layers={n_layers}.",
        "Give one cache for each layer: new_caches(model) makes them.",
    )
    lengths = [cache.length for cache in caches]
    require(
        len(set(lengths)) == 1,
        f"caches hold different lengths {lengths}.",
        "All layers have seen the same tokens: use caches from one run.",
    )
    require(
        lengths[0] == pos_offset,
        f"pos_offset={pos_offset} but the caches hold {lengths[0]} tokens.",
        f"The new tokens come right behind them: pass pos_offset={lengths[0]}.",
    )
    rows = caches[0].batch_size
    require(
        rows in (None, ids.shape[0]),
        f"ids has {ids.shape[0]} rows but the caches hold {rows}.",
        "Continue the same batch, or start with new caches.",
    )


def known_padding(
    caches, attention_mask, ids: Tensor, pos_offset: int
) -> Tensor | None:
    """The mask of the padding among all P + T tokens, as given or as the caches know it."""
    B, total = ids.shape[0], pos_offset + ids.shape[1]
    before = caches[0].real if caches else None
    if attention_mask is None:
        if before is None:
            return None
        return torch.cat((before, torch.ones_like(ids, dtype=torch.bool)), dim=1)
    require(
        isinstance(attention_mask, Tensor)
        and tuple(attention_mask.shape) == (B, total),
        f"attention_mask={tuple(getattr(attention_mask, 'shape', ()))} does not cover "
        f"B={B} rows of P + T = {total} tokens.",
        f"Give one entry for each cached and each new token: shape ({B}, {total}).",
    )
    attention_mask = attention_mask.bool()
    require(
        bool(attention_mask.any(dim=1).all()),
        "attention_mask has a row without a single real token.",
        "Leave such a row out of the batch.",
    )
    if pos_offset and caches:
        known = (
            torch.ones_like(attention_mask[:, :pos_offset])
            if before is None
            else before
        )
        require(
            torch.equal(known, attention_mask[:, :pos_offset]),
            "attention_mask differs from the padding of the cached tokens.",
            "Pass the mask of the prompt again, with the new tokens appended.",
        )
    return None if bool(attention_mask.all()) else attention_mask
