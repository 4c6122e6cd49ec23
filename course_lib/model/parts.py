"""The swappable parts of a decoder as plain choices: position, attention, router."""

import math
from dataclasses import dataclass

from .checks import (
    check_choice,
    check_counts,
    check_optional_count,
    check_part,
    check_positive,
    divisors,
    is_number,
    require,
)


@dataclass(frozen=True)
class Interpolation:
    """Position interpolation: every frequency divided by `factor`.

    Source: Chen et al., arXiv 2306.15595. Module 05."""

    factor: float = 4.0

    def __post_init__(self):
        check_positive(self, "factor")


@dataclass(frozen=True)
class NTK:
    """NTK-aware scaling: the base grows to theta * factor^(d / (d - 2)), so that the
    fastest pair keeps its speed and the slowest is interpolated by `factor`.

    Source: described in YaRN, arXiv 2309.00071, section 3.1. Module 05."""

    factor: float = 4.0

    def __post_init__(self):
        check_positive(self, "factor")


@dataclass(frozen=True)
class YaRN:
    """YaRN: pairs that turn often within `original_length` keep their frequency, those
    that turn rarely are divided by `factor`, a linear ramp lies between; cos and sin are
    multiplied by the attention factor, 0.1 ln(factor) + 1 unless given.

    Source: Peng et al., arXiv 2309.00071, section 3. Module 05."""

    factor: float = 4.0
    original_length: int = 2048  # tokens seen in pre-training
    beta_fast: float = 32.0  # turns; more than these: kept
    beta_slow: float = 1.0  # turns; fewer than these: divided
    attention_factor: float | None = None
    truncate: bool = True  # round the ends of the ramp outwards to whole pairs

    def __post_init__(self):
        check_positive(self, "factor", "original_length", "beta_fast", "beta_slow")
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
    """Llama 3.1's scaling: wavelengths below original_length / high keep their frequency,
    above original_length / low they are divided by `factor`, between them a mix that is
    linear in original_length / wavelength.

    Source: Llama 3 report, arXiv 2407.21783; Hugging Face `rope_type: llama3`. Module 05."""

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original_length: int = 8192

    def __post_init__(self):
        check_positive(self, "factor", "low", "high", "original_length")
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
    """How queries and keys are rotated (the base is `Config.rope_theta`). Module 05."""

    pairing: str = (
        "half"  # "half": (i, i + d/2), as in HF weights; "interleaved": (2i, 2i+1)
    )
    fraction: float = 1.0  # share of each head that takes part
    proportional: bool = (
        False  # False: the ladder spans the rotated part (partial RoPE);
    )
    #                             True: it spans the whole head, its slow end stands still
    scaling: Interpolation | NTK | YaRN | Llama3 | None = None
    nope_every: int | None = None  # layers n-1, 2n-1, ... are not rotated at all

    def __post_init__(self):
        check_choice(self, "pairing", PAIRINGS)
        require(
            is_number(self.fraction) and 0 < self.fraction <= 1,
            f"fraction={self.fraction!r} is not a share of the head.",
            "Give a number above 0 and at most 1, for example 0.25 or 1.0.",
        )
        check_optional_count(self, "nope_every")
        check_part(self, "scaling", (*SCALINGS, type(None)))

    def rotates(self, layer: int) -> bool:
        return self.nope_every is None or (layer + 1) % self.nope_every != 0


@dataclass(frozen=True)
class ALiBi:
    """No rotation: head h adds -2^(-8 (h+1) / H) * distance to its scores.

    Source: Press et al., arXiv 2108.12409, section 3. Module 05."""

    def rotates(self, layer: int) -> bool:
        return False


FORMS_OF_ATTENTION = ("sdpa", "explicit")


@dataclass(frozen=True)
class GQA:
    """Grouped-query attention: n_kv_heads of width d_head serve n_heads query heads
    (n_kv_heads = n_heads is multi-head, 1 is multi-query attention). Module 09."""

    qk_norm: bool = True  # RMSNorm over each query and key head before RoPE
    window: int | None = None  # keys a query sees, itself included; None: all before it
    sinks: bool = False  # one learned logit a head in the softmax's denominator
    form: str = (
        "sdpa"  # "sdpa": torch's fused kernel; "explicit": scores one can look at
    )

    def __post_init__(self):
        check_optional_count(self, "window")
        check_choice(self, "form", FORMS_OF_ATTENTION)

    def check(self, cfg):
        require(
            cfg.n_heads % cfg.n_kv_heads == 0,
            f"n_heads={cfg.n_heads} is not a multiple of n_kv_heads={cfg.n_kv_heads}.",
            "Each key/value head serves the same number of query heads: choose "
            f"n_kv_heads from {divisors(cfg.n_heads)}.",
        )

    def d_rotated(self, cfg) -> int:
        """Width of the part of a head that RoPE turns."""
        fraction = cfg.position.fraction if isinstance(cfg.position, Rope) else 1.0
        proportional = isinstance(cfg.position, Rope) and cfg.position.proportional
        return cfg.d_head if proportional else round(cfg.d_head * fraction)


FORMS_OF_MLA = ("absorbed", "naive")


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention: a token leaves one latent of `kv_lora_rank` and one
    rotated key of `d_rope` for all heads; n_kv_heads and d_head do not apply. Module 09."""

    kv_lora_rank: int = 64  # r, width of the cached latent
    d_rope: int = 16  # width of the shared rotated key, cached beside it
    d_nope: int = 32  # unrotated width of a query/key head
    d_value: int = 32  # width of a value head
    q_lora_rank: int | None = None  # None: queries straight from the stream
    form: str = "absorbed"  # "absorbed": attend in the latent; "naive": expand it first

    def __post_init__(self):
        check_counts(self, "kv_lora_rank", "d_rope", "d_nope", "d_value")
        check_optional_count(self, "q_lora_rank")
        check_choice(self, "form", FORMS_OF_MLA)

    def check(self, cfg):
        rope = isinstance(cfg.position, Rope)
        require(
            rope and cfg.position.fraction == 1.0,
            f"position={cfg.position} does not go with MLA.",
            "MLA already separates a rotated part (d_rope) from an unrotated one "
            "(d_nope): use Rope() with fraction=1.0.",
        )

    def d_rotated(self, cfg) -> int:
        return self.d_rope


ROUTERS = ("softmax_selected", "softmax_all", "softmax_renormalized", "sigmoid")
FORMS_OF_MOE = ("sorted", "loop")


@dataclass(frozen=True)
class Router:
    """How the top-k experts of a token are chosen and weighted. Module 12.

    softmax_selected      softmax over the k chosen logits (Mixtral, gpt-oss; the default)
    softmax_all           softmax over all E, the chosen k keep their share (Switch)
    softmax_renormalized  the same, divided by the sum of the chosen (equals the first)
    sigmoid               sigmoid scores, divided by the sum of the chosen (DeepSeek-V3)
    """

    kind: str = "softmax_selected"
    selection_bias: bool = (
        False  # a buffer added for the choice only, never for weights
    )
    n_groups: int = 1  # experts stand in groups, of which ...
    n_groups_active: int = 1  # ... these many (by the sum of their two best) are open
    normalize: bool = True  # sigmoid only: divide by the sum of the chosen scores
    scaling: float = 1.0  # multiplies the weights (DeepSeek-V3: 2.5)
    form: str = "sorted"  # how tokens reach experts: "sorted" or the plain "loop"

    def __post_init__(self):
        check_choice(self, "kind", ROUTERS)
        check_choice(self, "form", FORMS_OF_MOE)
        check_counts(self, "n_groups", "n_groups_active")
        check_positive(self, "scaling")
        require(
            self.n_groups_active <= self.n_groups,
            f"n_groups_active={self.n_groups_active} exceeds n_groups={self.n_groups}.",
            f"At most all {self.n_groups} groups can be open.",
        )

    def has_task_gradient(self, k: int) -> bool:
        """One weight divided by itself is 1: then the task loss never trains the gate."""
        if self.kind == "softmax_all" or (
            self.kind == "sigmoid" and not self.normalize
        ):
            return True
        return k > 1

    def check(self, cfg):
        E, k = cfg.n_experts, cfg.n_experts_active
        require(
            k <= E,
            f"n_experts_active={k} exceeds n_experts={E}.",
            f"A token can go to at most all {E} experts: choose 1 to {E}.",
        )
        require(
            self.has_task_gradient(k),
            f"n_experts_active={k} with router kind={self.kind!r} makes every weight "
            "exactly 1, so the router would get no gradient from the task.",
            "Use two or more active experts, Router(kind='softmax_all'), or "
            "Router(kind='sigmoid', normalize=False).",
        )
        require(
            E % self.n_groups == 0,
            f"n_experts={E} is not a multiple of n_groups={self.n_groups}.",
            f"Groups are of equal size: choose n_groups from {divisors(E)}.",
        )
        open_experts = E // self.n_groups * self.n_groups_active
        require(
            k <= open_experts,
            f"n_experts_active={k} exceeds the {open_experts} experts of the "
            f"n_groups_active={self.n_groups_active} open groups.",
            "Open more groups or choose fewer experts.",
        )
