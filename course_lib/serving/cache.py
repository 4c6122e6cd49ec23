"""What attention remembers of the tokens so far, so that none is computed twice.

The contract, for every attention variant: `update(*new)` stores what the new tokens leave
behind (k and v, or MLA's latent and rotated key) and returns all that the new queries may
need; `length` counts the tokens appended; `check_room(n)` refuses before anything is written;
`trim(n)` forgets the last n; `real` marks the real tokens of left-padded rows. The decoder
derives every position from `length`; a cache knows nothing of positions.
"""

import torch
from torch import Tensor

from course_lib.model.checks import is_whole, require

FIRST_CAPACITY = 16


def rows_of(tensor: Tensor) -> tuple:
    """What must stay the same from update to update: shape without tokens, dtype, device."""
    shape = (*tensor.shape[:-2], tensor.shape[-1])
    return shape, str(tensor.dtype), str(tensor.device)


def check_new(new: tuple[Tensor, ...], held: list[Tensor] | None, spec: dict | None):
    """Refuse tensors of another number, shape, dtype or device than the cache was made for:
    a slice write would broadcast or cast them in silence."""
    tokens = sorted({tensor.shape[-2] for tensor in new})
    require(
        len(tokens) == 1,
        f"new holds tensors of {tokens} tokens.",
        "Keys and values come together, a row for each new token.",
    )
    got = [(*tensor.shape[1:-2], tensor.shape[-1]) for tensor in new]
    require(
        spec is None or got == [tuple(shape) for shape in spec.values()],
        f"new: one token leaves {got}, but this cache was made for {spec}.",
        "Make the caches with new_caches(model) for the model that fills them.",
    )
    before = [rows_of(tensor) for tensor in held or new]
    now = [rows_of(tensor) for tensor in new]
    require(
        now == before,
        f"new rows are {now}, but the cache holds {before}.",
        "Continue the same batch in the same dtype, or start with a new cache.",
    )


def check_capacity(name: str, value):
    require(
        is_whole(value, least=1),
        f"{name}={value!r} is not a number of tokens.",
        "Give an int of at least 1.",
    )


def check_rows(rows: Tensor, batch_size: int | None):
    B = batch_size or 0
    require(
        isinstance(rows, Tensor)
        and rows.dtype in (torch.int32, torch.int64)
        and rows.dim() == 1
        and all(0 <= row < B for row in rows.tolist()),
        f"rows={rows} are not rows of a cache that holds {B}.",
        f"Give a tensor of ints from 0 to {B - 1}, one for each row to be.",
    )


def check_trim(n: int, length: int):
    require(
        is_whole(n, least=0) and n <= length,
        f"trim(n={n!r}) of a cache of {length} tokens.",
        f"Give an int from 0 to {length}.",
    )


class KVCache:
    """All tokens so far of one layer, in buffers written in place.

    `KVCache()` grows by doubling; with a capacity it is allocated once and refuses more.
    What is stored is detached: no gradient flows into cached tokens. Raises ValueError,
    before anything is written, for what does not fit. Module 11."""

    def __init__(self, capacity: int | None = None, spec: dict | None = None):
        if capacity is not None:
            check_capacity("capacity", capacity)
        self.capacity, self.spec = capacity, spec
        self.length = 0
        self.real: Tensor | None = None  # (B, length), None while no row is padded
        self.buffers: list[Tensor] | None = None

    @property
    def batch_size(self) -> int | None:
        return None if self.buffers is None else self.buffers[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes that the tokens so far occupy."""
        return sum(t.numel() * t.element_size() for t in self.held())

    def held(self) -> list[Tensor]:
        return [buffer[..., : self.length, :] for buffer in self.buffers or []]

    def check_room(self, n: int):
        full = self.capacity is not None and self.length + n > self.capacity
        require(
            not full,
            f"capacity={self.capacity} tokens, of which {self.length} are taken: "
            f"{n} more do not fit.",
            "Nothing was written. Make the cache larger or trim(n) it first.",
        )

    def update(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Store (B, ..., T, width) tensors; return views (B, ..., length, width)."""
        n = new[0].shape[-2]
        self.check_room(n)
        check_new(new, self.buffers, self.spec)
        self.reserve(n, new)
        for buffer, tensor in zip(self.buffers, new, strict=True):
            buffer[..., self.length : self.length + n, :] = tensor.detach()
        self.length += n
        return tuple(self.held())

    def reserve(self, n: int, like: tuple[Tensor, ...]):
        room = self.buffers[0].shape[-2] if self.buffers else 0
        if self.length + n <= room:
            return
        size = self.capacity or max(2 * room, self.length + n, FIRST_CAPACITY)
        larger = [t.new_empty(*t.shape[:-2], size, t.shape[-1]) for t in like]
        for target, source in zip(larger, self.held(), strict=False):
            target[..., : self.length, :] = source
        self.buffers = larger

    def trim(self, n: int):
        """Forget the last n tokens, as after a rejected guess."""
        check_trim(n, self.length)
        self.length -= n
        self.real = None if self.real is None else self.real[:, : self.length]

    def reorder(self, rows: Tensor):
        """Let row i continue what row rows[i] held, as beam search does."""
        check_rows(rows, self.batch_size)
        self.buffers = [buffer.index_select(0, rows) for buffer in self.buffers or []] or None
        self.real = None if self.real is None else self.real.index_select(0, rows)


class RollingCache:
    """The last `window` tokens of one layer: bytes stop growing there.

    The same contract as KVCache; `length` goes on counting all tokens.
    Source of rolling buffers: Mistral 7B, arXiv 2310.06825, section 2. Module 10."""

    def __init__(self, window: int, spec: dict | None = None):
        check_capacity("window", window)
        self.window, self.spec = window, spec
        self.length = 0
        self.real: Tensor | None = None
        self.kept: list[Tensor] | None = None

    @property
    def batch_size(self) -> int | None:
        return None if self.kept is None else self.kept[0].shape[0]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.held())

    def held(self) -> list[Tensor]:
        return self.kept or []

    def check_room(self, n: int):
        """There is always room: the oldest tokens leave."""

    def update(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Return what the T new queries may see: up to window - 1 old tokens and the new."""
        check_new(new, self.kept, self.spec)
        n = new[0].shape[-2]
        old = [t[..., max(0, t.shape[-2] - (self.window - 1)) :, :] for t in self.held()]
        seen = (
            [torch.cat((o, t.detach()), dim=-2) for o, t in zip(old, new, strict=True)]
            if old
            else [t.detach() for t in new]
        )
        self.kept = [t[..., -self.window :, :].clone() for t in seen]
        self.length += n
        return tuple(seen)

    def trim(self, n: int):
        """Forget the last n tokens; refused once older ones have left the window."""
        check_trim(n, self.length)
        require(
            self.length <= self.window or n == 0,
            f"trim(n={n}): {self.length} tokens passed a window of {self.window}, and the "
            "older ones that would be needed again are gone.",
            "Trim before the window is full, or use a KVCache.",
        )
        self.length -= n
        self.kept = [t[..., : self.length, :] for t in self.held()] or None
        self.real = None if self.real is None else self.real[:, : self.length]

    def reorder(self, rows: Tensor):
        """Let row i continue what row rows[i] held, as beam search does."""
        check_rows(rows, self.batch_size)
        self.kept = [t.index_select(0, rows) for t in self.held()] or None
        self.real = None if self.real is None else self.real.index_select(0, rows)


def new_caches(model, capacity: int | None = None) -> list[KVCache | RollingCache]:
    """One empty cache for each layer of `model`, of the kind that its attention needs.

    capacity counts tokens; None grows. Windowed layers get a RollingCache. Module 11."""
    window = getattr(model.cfg.attention, "window", None)
    specs = [block.attn.cache_spec() for block in model.blocks]
    if window is not None:
        return [RollingCache(window, spec) for spec in specs]
    return [KVCache(capacity, spec) for spec in specs]
