"""What a notebook draws and checks with; nothing else in the package imports it."""

from .check import check

__all__ = ["check"]
