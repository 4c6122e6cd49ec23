"""How a decoder knows the order of its tokens, as plain choices: RoPE or ALiBi."""

import math
from dataclasses import dataclass

from .checks import (
    check_choice,
    check_counts,
    check_flags,
    check_optional_count,
    check_part,
    check_positive,
    is_number,
    require,
)


@dataclass(frozen=True)
class Interpolation:
    """Position interpolation: every frequency divided by `factor`.

    Raises ValueError naming field, value and rule, as all parts do.
    Source: Chen et al., arXiv 2306.15595. Module 05."""

    factor: float = 4.0

    def __post_init__(self):
        check_positive(self, "factor")


@dataclass(frozen=True)
class NTK:
    """NTK-aware scaling: the base grows to theta * factor^(d / (d - 2)), so that the
    fastest pair keeps its speed and the slowest is divided by `factor`.

    Source: described in YaRN, arXiv 2309.00071, section 3.1. Module 05."""

    factor: float = 4.0

    def __post_init__(self):
        check_positive(self, "factor")


@dataclass(frozen=True)
class YaRN:
    """YaRN: pairs that turn often within `original_length` keep their frequency, those
    that turn rarely are divided by `factor`, a linear ramp lies between; cos and sin
    are multiplied by the attention factor, 0.1 ln(factor) + 1 unless given.

    Source: Peng et al., arXiv 2309.00071, section 3. Module 05."""

    factor: float = 4.0
    original_length: int = 2048  # tokens seen in pre-training
    beta_fast: float = 32.0  # turns; more than these: kept
    beta_slow: float = 1.0  # turns; fewer than these: divided
    attention_factor: float | None = None
    truncate: bool = True  # round the ends of the ramp outwards to whole pairs

    def __post_init__(self):
        check_positive(self, "factor", "beta_fast", "beta_slow")
        check_counts(self, "original_length")
        check_flags(self, "truncate")
        if self.attention_factor is not None:
            check_positive(self, "attention_factor")
        require(
            self.beta_fast >= self.beta_slow,
            f"beta_fast={self.beta_fast} is below beta_slow={self.beta_slow}.",
            "beta_fast counts the turns of the fast pairs, so it is the larger: the "
            "paper uses 32 and 1.",
        )

    @property
    def magnitude(self) -> float:
        """What cos and sin are multiplied by (the logits grow by its square)."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1's scaling: pairs that turn more than `high` times within
    `original_length` keep their frequency, fewer than `low` times: divided by `factor`,
    between them a mix that is linear in the number of turns.

    Source: Llama 3 report, arXiv 2407.21783; Hugging Face `rope_type: llama3`.
    Module 05."""

    factor: float = 8.0
    low: float = 1.0  # turns within original_length; fewer: divided
    high: float = 4.0  # turns; more: kept
    original_length: int = 8192  # tokens seen in pre-training

    def __post_init__(self):
        check_positive(self, "factor", "low", "high")
        check_counts(self, "original_length")
        require(
            self.high > self.low,
            f"high={self.high} is not above low={self.low}.",
            "The mix runs from low to high turns in the original length: Llama 3.1 "
            "uses 1 and 4.",
        )


PAIRINGS = ("half", "interleaved")
SCALINGS = (Interpolation, NTK, YaRN, Llama3)


@dataclass(frozen=True)
class Rope:
    """How queries and keys are rotated (the base is `Config.rope_theta`).

    Pairs are (i, i + d/2) for "half", as in Hugging Face's weights, and (2i, 2i + 1)
    for "interleaved". With fraction < 1 only the first channels turn: their ladder of
    frequencies spans that part alone, or, if proportional, the whole head, of which the
    slow end then stands still. Source: Su et al., arXiv 2104.09864. Module 05."""

    pairing: str = "half"
    fraction: float = 1.0  # share of each head that takes part
    proportional: bool = False
    scaling: Interpolation | NTK | YaRN | Llama3 | None = None
    nope_every: int | None = None  # layers n-1, 2n-1, ... are not rotated at all

    def __post_init__(self):
        check_choice(self, "pairing", PAIRINGS)
        require(
            is_number(self.fraction) and 0 < self.fraction <= 1,
            f"fraction={self.fraction!r} is not a share of the head.",
            "Give a number above 0 and at most 1, for example 0.25 or 1.0.",
        )
        check_flags(self, "proportional")
        check_part(self, "scaling", (*SCALINGS, type(None)))
        check_optional_count(self, "nope_every")

    def rotates(self, layer: int) -> bool:
        """Whether `layer` turns its queries and keys."""
        return self.nope_every is None or (layer + 1) % self.nope_every != 0

    def ladder_width(self, d: int) -> int:
        """Channels of a head of width d that the ladder of frequencies spans."""
        return d if self.proportional else round(d * self.fraction)


@dataclass(frozen=True)
class ALiBi:
    """No rotation: head h adds -2^(-8 (h + 1) / H) * distance to its scores.

    Source: Press et al., arXiv 2108.12409, section 3. Module 05."""

    def rotates(self, layer: int) -> bool:
        """No layer does."""
        return False

    def ladder_width(self, d: int) -> int:
        """None of the d channels."""
        return 0
