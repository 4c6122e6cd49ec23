"""A named place where an inner tensor can be watched."""

from torch import Tensor, nn


class Tap(nn.Module):
    """Return x unchanged; `trace` hooks it and reads its axes, for example "B H T h".

    No parameters, no effect. The letters are listed in `course_lib.model`.
    Module 16."""

    def __init__(self, axes: str):
        super().__init__()
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        return x

    def extra_repr(self) -> str:
        return self.axes
