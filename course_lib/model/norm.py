"""RMSNorm: each token's vector divided by its own root mean square."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Scale x to root mean square 1, then by a learned gain g.

    y = x / sqrt(mean(x^2) + eps) * g, over the last axis; any shape in, the same out.
    Computed in float32 to the end and cast back once, so the output has the dtype of x.
    Source: Zhang and Sennrich, arXiv 1910.07467, equation 4. Module 06."""

    def __init__(self, d: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        # eps stands inside the root: a zero vector gives zeros, not NaN
        inverse_rms = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (x32 * inverse_rms * self.weight.float()).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"
