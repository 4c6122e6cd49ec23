"""What `ModernDecoder.forward` accepts, refused with a sentence before any write."""

import torch
from torch import Tensor

from .checks import is_whole, require
from .config import Config


def check_ids(ids: Tensor, cfg: Config):
    is_ids = isinstance(ids, Tensor) and ids.dtype in (torch.int64, torch.int32)
    shape = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
    require(
        is_ids and ids.dim() == 2,
        f"ids={shape} of {getattr(ids, 'dtype', 'no dtype')} is no batch of token ids.",
        "Give an integer tensor of shape (B, T), such as torch.tensor([[1, 2, 3]]).",
    )
    require(ids.numel() > 0, f"ids={shape} is empty.", "Give at least one token.")
    if ids.is_meta:  # shapes without values
        return
    low, high = int(ids.min()), int(ids.max())
    require(
        0 <= low and high < cfg.vocab_size,
        f"ids holds {high if low >= 0 else low}, outside vocab_size={cfg.vocab_size}.",
        f"Every id must be from 0 to {cfg.vocab_size - 1}.",
    )


def check_pos_offset(pos_offset):
    require(
        is_whole(pos_offset, least=0),
        f"pos_offset={pos_offset!r} is not a position.",
        "Give the number of tokens before these, an int of 0 or more.",
    )


def check_caches(caches, pos_offset: int, ids: Tensor, cfg: Config):
    if caches is None:
        return
    count = len(caches) if isinstance(caches, list | tuple) else repr(caches)
    require(
        count == cfg.n_layers,
        f"caches={count} for n_layers={cfg.n_layers}.",
        "Give a list of one cache for each layer: new_caches(model) makes them.",
    )
    strays = [cache for cache in caches if not hasattr(cache, "update")]
    require(
        not strays,
        f"caches holds {strays[:1]}, which is no cache.",
        "new_caches(model) makes one for each layer.",
    )
    different = len({id(cache) for cache in caches})
    require(
        different == len(caches),
        f"caches={len(caches)} entries are {different} different objects.",
        "Each layer needs a cache of its own: new_caches(model) makes them.",
    )
    check_fill(caches, pos_offset, ids)
    check_windows(caches, getattr(cfg.attention, "window", None))


def check_fill(caches, pos_offset: int, ids: Tensor):
    lengths = sorted({cache.length for cache in caches})
    require(
        len(lengths) == 1,
        f"caches hold different lengths {lengths}.",
        "All layers have seen the same tokens: use caches from one run.",
    )
    require(
        lengths[0] == pos_offset,
        f"pos_offset={pos_offset} but the caches hold {lengths[0]} tokens.",
        f"The new tokens come right behind them: pass pos_offset={lengths[0]}.",
    )
    B = ids.shape[0]
    others = [rows for c in caches if (rows := c.batch_size) not in (None, B)]
    require(
        not others,
        f"ids has {B} rows but the caches hold {others[:1]}.",
        "Continue the same batch, or start with new caches.",
    )
    for cache in caches:
        cache.check_room(ids.shape[1])


def check_windows(caches, window: int | None):
    """A cache that forgets must keep at least what attention's window looks back on."""
    for cache in caches:
        kept = getattr(cache, "window", None)
        require(
            kept is None or (window is not None and kept >= window),
            f"caches keep the last {kept} tokens, but attention has window={window}.",
            "Keys would be missing silently: new_caches(model) chooses the right kind.",
        )


def check_specs(caches, specs: list[dict]):
    """A cache that says what it was made for must fit its layer."""
    for cache, spec in zip(caches or [], specs, strict=False):
        made_for = getattr(cache, "spec", None)
        require(
            made_for is None or made_for == spec,
            f"caches were made for {made_for} a token, but a layer leaves {spec}.",
            "Make them with new_caches(model) for the model that fills them.",
        )


def known_padding(caches, attention_mask, ids: Tensor, P: int) -> Tensor | None:
    """The real tokens among P + T, as given or as the caches know; None: all are."""
    before = caches[0].real if caches else None
    if attention_mask is None:
        if before is None:
            return None
        return torch.cat((before, torch.ones_like(ids, dtype=torch.bool)), dim=1)
    check_attention_mask(attention_mask, ids.shape[0], P + ids.shape[1])
    attention_mask = attention_mask.bool()
    if P:
        cached = attention_mask[:, :P]
        require(
            torch.equal(cached, torch.ones_like(cached) if before is None else before),
            f"attention_mask differs from the padding of the P={P} cached tokens.",
            "Pass the mask of the prompt again, with the new tokens appended.",
        )
    return None if bool(attention_mask.all()) else attention_mask


def check_attention_mask(attention_mask, B: int, total: int):
    shape = tuple(getattr(attention_mask, "shape", ()))
    require(
        isinstance(attention_mask, Tensor) and shape == (B, total),
        f"attention_mask={shape} does not cover B={B} rows of P + T = {total} tokens.",
        f"Give one entry for each cached and each new token: shape ({B}, {total}).",
    )
    require(
        attention_mask.dtype == torch.bool or not attention_mask.is_floating_point(),
        f"attention_mask={attention_mask.dtype} is a mask of numbers to add.",
        "Give True (or 1) for a real token and False (or 0) for padding.",
    )
