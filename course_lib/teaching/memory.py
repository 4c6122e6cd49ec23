"""Results by state, bounded in number and in bytes: the least recently used leave first."""

from collections import OrderedDict
from collections.abc import Callable, Hashable

import numpy as np
import torch

MOST_RESULTS = 32
MOST_BYTES = 8 * 2**20


def nbytes(value) -> int:
    """Bytes of all arrays and tensors in plain containers and objects with fields."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().nbytes()
    if isinstance(value, dict):
        return sum(nbytes(item) for item in value.values())
    if isinstance(value, list | tuple | set):
        return sum(nbytes(item) for item in value)
    return nbytes(vars(value)) if hasattr(value, "__dict__") else 0


class Results:
    """What was computed for which state; the newest is always kept, whatever its size."""

    def __init__(self, most: int = MOST_RESULTS, most_bytes: int = MOST_BYTES):
        self.most, self.most_bytes = most, most_bytes
        self.held: OrderedDict[Hashable, tuple[object, int]] = OrderedDict()

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.held.values())

    def get(self, key: Hashable, compute: Callable[[], object]):
        """The result for `key`, computed at most once while it is held."""
        if key not in self.held:
            result = compute()
            self.held[key] = (result, nbytes(result))
            while len(self.held) > 1 and self.too_much():
                self.held.popitem(last=False)
        self.held.move_to_end(key)
        return self.held[key][0]

    def too_much(self) -> bool:
        return len(self.held) > self.most or self.total_bytes > self.most_bytes
