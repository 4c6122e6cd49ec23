"""A pytest plugin for nbval: cells by id, floats exact unless tagged, dead kernels noticed."""

import os
import re
import time
from queue import Empty

import nbval.plugin
from nbval.kernel import RunningKernel
from nbval.plugin import IPyNbCell

from tools.execute import KERNEL_ENVIRONMENT
from tools.normalise import scrub

TOLERANCE_TAG = "float-tolerance"
RELATIVE = 2e-3
ABSOLUTE = 1e-6
POLL_SECONDS = 1.0
DECIMAL = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?\b\d+[eE][-+]?\d+")


class TolerantText(str):
    """Text that equals another when all but the decimals is the same and these are close."""

    __hash__ = str.__hash__

    def __eq__(self, other):
        return isinstance(other, str) and close(str(self), str(other))

    def __ne__(self, other):
        return not self == other


def close(left: str, right: str) -> bool:
    """Compare two texts: equal around their decimals, and each pair within the tolerance."""
    if _without_decimals(left) != _without_decimals(right):
        return False
    pairs = zip(DECIMAL.findall(left), DECIMAL.findall(right), strict=True)
    return all(_close_numbers(float(a), float(b)) for a, b in pairs)


def _without_decimals(text: str) -> str:
    # A sign changes the width of a printed column, so runs of blanks count as one.
    return re.sub(r"[ \t]+", " ", DECIMAL.sub("#", text))


def _close_numbers(a: float, b: float) -> bool:
    return abs(a - b) <= ABSOLUTE + RELATIVE * max(abs(a), abs(b))


class WatchedKernel(RunningKernel):
    """A kernel whose death is noticed within seconds; nbval would wait for the cell's time-out."""

    def get_message(self, stream, timeout=None):
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while True:
            wait = min(POLL_SECONDS, max(0.0, deadline - time.monotonic()))
            try:
                return super().get_message(stream, timeout=wait)
            except Empty:
                if not self.is_alive():
                    raise RuntimeError("The kernel died in this cell.") from None
                if time.monotonic() >= deadline:
                    raise


def _sanitize(cell, text):
    if not isinstance(text, str):
        return text
    tolerant = TOLERANCE_TAG in cell.cell.metadata.get("tags", [])
    return TolerantText(scrub(text)) if tolerant else scrub(text)


def _from_parent(cls, parent, *, name, cell, **rest):
    return _make_cell(parent, name=cell.get("id", name), cell=cell, **rest)


def pytest_configure():
    """Give nbval's kernels the environment that make refresh uses; figures stay inline."""
    os.environ.update(KERNEL_ENVIRONMENT)
    os.environ.pop("MPLBACKEND", None)


# nbval has no hooks for these three, and its cells cannot be subclassed: they call super() by name.
_make_cell = IPyNbCell.from_parent
IPyNbCell.from_parent = classmethod(_from_parent)
IPyNbCell.sanitize = _sanitize
nbval.plugin.RunningKernel = WatchedKernel
