"""Rotary position embedding: queries and keys turned by angles that grow."""

import math
from functools import partial

import torch
from torch import Tensor, nn

from .checks import require
from .config import Config
from .position import NTK, PAIRINGS, ALiBi, Interpolation, Llama3, Rope, YaRN


def inverse_frequencies(d: int, theta: float) -> Tensor:
    """Radians a position for each of the d/2 pairs: theta^(-2i/d), i = 0 .. d/2 - 1.

    Shape (d/2,), float64. Raises ValueError for an odd d.
    Source: Su et al., arXiv 2104.09864, section 3.2.2. Module 05."""
    require(d % 2 == 0, f"d={d} is odd.", f"RoPE turns pairs: use {d - 1} or {d + 1}.")
    return theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)


def yarn_ramp(d: int, theta: float, yarn: YaRN) -> tuple[float, float]:
    """The pair indices between which YaRN's ramp runs from "keep" to "divide".

    Pair i turns original_length * theta^(-2i/d) / (2 pi) times; solved for i."""

    def pair_with(turns: float) -> float:
        length = yarn.original_length
        return d * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(yarn.beta_fast), pair_with(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, d - 1)


def scale_yarn(freq: Tensor, d: int, theta: float, yarn: YaRN) -> Tensor:
    low, high = yarn_ramp(d, theta, yarn)
    pairs = torch.arange(d // 2, dtype=torch.float64)
    # both ends on one pair would divide by zero; the ramp is then a step
    divided = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    return freq / yarn.factor * divided + freq * (1 - divided)


def scale_llama3(freq: Tensor, scaling: Llama3) -> Tensor:
    turns = scaling.original_length * freq / (2 * math.pi)
    kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return freq * kept + freq / scaling.factor * (1 - kept)


def scaled_frequencies(rope: Rope, d: int, theta: float) -> Tensor:
    """Radians a position for each pair, after the scaling of `rope`; shape (d/2,).

    Sources: see Interpolation, NTK, YaRN, Llama3. Module 05."""
    scaling = rope.scaling
    if isinstance(scaling, NTK):
        theta = theta * scaling.factor ** (d / max(d - 2, 1))
    freq = inverse_frequencies(d, theta)
    if isinstance(scaling, Interpolation):
        freq = freq / scaling.factor
    elif isinstance(scaling, YaRN):
        freq = scale_yarn(freq, d, theta, scaling)
    elif isinstance(scaling, Llama3):
        freq = scale_llama3(freq, scaling)
    if rope.proportional:  # the slow end of the ladder stands still
        freq[round(rope.fraction * d / 2) :] = 0
    return freq


class RotaryTable(nn.Module):
    """cos and sin of position * frequency: positions (..., T) to two (..., T, d/2).

    Radians, computed at each call in float32: no buffer, so casting the model cannot
    round the angles (bfloat16 has no 257). Source: arXiv 2104.09864. Module 05."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.d, self.theta = cfg.d_rotated, cfg.rope_theta
        self.rope = cfg.position if isinstance(cfg.position, Rope) else Rope()
        scaling = self.rope.scaling
        self.magnitude = scaling.magnitude if isinstance(scaling, YaRN) else 1.0

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        freq = scaled_frequencies(self.rope, self.d, self.theta)
        freq = freq.to(positions.device, torch.float32)
        angles = positions.float().unsqueeze(-1) * freq  # (..., T, d/2) radians
        return angles.cos() * self.magnitude, angles.sin() * self.magnitude

    def extra_repr(self) -> str:
        return f"d={self.d}, theta={self.theta:g}, {self.rope}"


def check_table(x: Tensor, cos: Tensor, pairing: str):
    require(
        cos.shape[-2] == x.shape[-2],
        f"cos has {cos.shape[-2]} rows for {x.shape[-2]} tokens.",
        "Give the table one row for each token of x: a shorter one would broadcast.",
    )
    require(
        2 * cos.shape[-1] <= x.shape[-1],
        f"cos has {cos.shape[-1]} columns, a pair each, for x of width {x.shape[-1]}.",
        f"Give at most {x.shape[-1] // 2} columns.",
    )
    require(
        pairing in PAIRINGS,
        f"pairing={pairing!r} is unknown.",
        f"Choose from {PAIRINGS}.",
    )


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, pairing: str = "half") -> Tensor:
    """Turn each pair (a, b) of x to (a cos - b sin, b cos + a sin).

    x (..., T, d), cos and sin (..., T, r/2) with r <= d: channels r.. pass unchanged.
    Pairs are (i, i + r/2) for "half", (2i, 2i + 1) for "interleaved". Raises ValueError
    unless cos has a row a token and fits. Source: arXiv 2104.09864, equation 34.
    Module 05."""
    check_table(x, cos, pairing)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    r = 2 * cos.shape[-1]
    turned, rest = x[..., :r], x[..., r:]
    if pairing == "half":
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)


def leave_unrotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What a layer without rotary positions (NoPE, ALiBi) does with its heads."""
    return x


def rotation(position: Rope | ALiBi, layer: int):
    """The function (x, cos, sin) -> x by which `layer` turns queries and keys."""
    if not position.rotates(layer):
        return leave_unrotated
    return partial(apply_rope, pairing=position.pairing)


def half_split_order(d: int) -> Tensor:
    """Channel order that makes half-split pairs of interleaved ones: evens, then odds.

    x[..., order] of an interleaved head behaves as a half-split head. Shape (d,).
    Module 05."""
    return torch.cat((torch.arange(0, d, 2), torch.arange(1, d, 2)))
