"""The dense feed-forward layer: a gated expansion, token by token."""

import torch.nn.functional as F
from torch import Tensor, nn


class SwiGLU(nn.Module):
    """Expand, gate, contract: W_down(silu(W_gate x) * W_up x).

    (..., D) to (..., D) through width F, three matrices and no bias.
    Source: Shazeer, arXiv 2002.05202, equation 6. Module 07."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.w_gate = nn.Linear(d_model, d_ff, bias=False)
        self.w_up = nn.Linear(d_model, d_ff, bias=False)
        self.w_down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_down(F.silu(self.w_gate(x)) * self.w_up(x))
