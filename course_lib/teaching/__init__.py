"""What a notebook draws and checks with; nothing else in the package imports it."""

from .check import check
from .reveal import source
from .swapping import swap

__all__ = ["check", "source", "swap"]
