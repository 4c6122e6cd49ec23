"""Seeded inputs that hide nothing: no unit gains, no zeros, no two axes of one size."""

import torch
from torch import Tensor, nn


def normal(seed: int, *shape: int) -> Tensor:
    """Draws from N(0, 1) that depend on the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole(seed: int, high: int, *shape: int) -> Tensor:
    """Whole numbers from 0 to high - 1, for example token ids."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def weights_of(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """A state dict for `module`: matrices keep the size of what they multiply, gains lie in
    0.5 to 1.5."""
    draw = torch.Generator().manual_seed(seed)
    state = {}
    for name, weight in module.state_dict().items():
        if weight.dim() == 1:
            state[name] = 0.5 + torch.rand(weight.shape, generator=draw)
        else:
            state[name] = torch.randn(weight.shape, generator=draw) / weight.shape[-1] ** 0.5
    return state
