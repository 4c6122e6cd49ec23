"""The swappable parts of a block as plain choices: its attention and its router."""

from dataclasses import dataclass

from .checks import (
    check_choice,
    check_counts,
    check_flags,
    check_optional_count,
    check_positive,
    divisors,
    require,
)
from .position import Rope

FORMS_OF_ATTENTION = ("sdpa", "explicit")


@dataclass(frozen=True)
class GQA:
    """Grouped-query attention: n_kv_heads of width d_head serve n_heads query heads
    (n_kv_heads = n_heads is multi-head, 1 is multi-query attention).

    The form "sdpa" is torch's fused kernel, "explicit" makes scores one can look at.
    Source: Ainslie et al., arXiv 2305.13245. Module 09."""

    qk_norm: bool = True  # RMSNorm over each query and key head before RoPE
    window: int | None = None  # keys a query sees, itself included; None: all before it
    sinks: bool = False  # one learned logit a head in the softmax's denominator
    form: str = "sdpa"

    def __post_init__(self):
        check_flags(self, "qk_norm", "sinks")
        check_optional_count(self, "window")
        check_choice(self, "form", FORMS_OF_ATTENTION)

    def check(self, cfg):
        """Refuse a Config that this attention cannot be built for."""
        require(
            cfg.n_heads % cfg.n_kv_heads == 0,
            f"n_heads={cfg.n_heads} is not a multiple of n_kv_heads={cfg.n_kv_heads}.",
            "Each key/value head serves the same number of query heads: choose "
            f"n_kv_heads from {divisors(cfg.n_heads)}.",
        )
        if isinstance(cfg.position, Rope):
            width, fraction = cfg.d_rotated, cfg.position.fraction
            require(
                width >= 2 and width % 2 == 0,
                f"d_head={cfg.d_head} with fraction={fraction}: RoPE would turn "
                f"{width} channels of a head, but it turns pairs.",
                "Make that an even number of at least 2, for example with d_head=32.",
            )

    def d_rotated(self, cfg) -> int:
        """Channels of a head that RoPE's table covers."""
        return cfg.position.ladder_width(cfg.d_head)


FORMS_OF_MLA = ("absorbed", "naive")


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention: a token leaves one latent of `kv_lora_rank` and one
    rotated key of `d_rope` for all heads; n_kv_heads and d_head do not apply.

    The form "absorbed" attends in the latent, "naive" expands it to heads first.
    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1. Module 09."""

    kv_lora_rank: int = 64  # r, width of the cached latent
    d_rope: int = 16  # p, width of the shared rotated key, cached beside it
    d_nope: int = 32  # unrotated width of a query/key head
    d_value: int = 32  # w, width of a value head
    q_lora_rank: int | None = None  # None: queries straight from the stream
    form: str = "absorbed"

    def __post_init__(self):
        check_counts(self, "kv_lora_rank", "d_rope", "d_nope", "d_value")
        check_optional_count(self, "q_lora_rank")
        check_choice(self, "form", FORMS_OF_MLA)
        require(
            self.d_rope % 2 == 0,
            f"d_rope={self.d_rope} is odd.",
            f"RoPE turns pairs: use {self.d_rope + 1}.",
        )

    def check(self, cfg):
        """Refuse a Config that this attention cannot be built for."""
        require(
            isinstance(cfg.position, Rope) and cfg.position.fraction == 1.0,
            f"position={cfg.position} does not go with MLA.",
            "MLA already separates a rotated part (d_rope) from an unrotated one "
            "(d_nope): use Rope() with fraction=1.0.",
        )

    def d_rotated(self, cfg) -> int:
        """Channels of a head that RoPE's table covers."""
        return self.d_rope


ROUTERS = ("softmax_selected", "softmax_all", "softmax_renormalized", "sigmoid")
FORMS_OF_MOE = ("sorted", "loop", "grouped")


@dataclass(frozen=True)
class Router:
    """How the top-k experts of a token are chosen and weighted.

    softmax_selected      softmax over the k chosen logits (Mixtral, gpt-oss)
    softmax_all           softmax over all E, the chosen k keep their share (Switch)
    softmax_renormalized  the same, divided by the sum of the chosen (equals the first)
    sigmoid               sigmoid scores, divided by the sum of the chosen (DeepSeek-V3)

    With groups, only the n_groups_active whose two best experts sum highest are open.
    Sources: arXiv 2401.04088, 2101.03961, 2412.19437. Module 12."""

    kind: str = "softmax_selected"
    selection_bias: bool = False  # a buffer added for the choice, never for weights
    n_groups: int = 1  # groups of equal size that the experts stand in
    n_groups_active: int = 1  # groups a token may choose from
    normalize: bool = True  # sigmoid only: divide by the sum of the chosen scores
    scaling: float = 1.0  # multiplies the weights (DeepSeek-V3: 2.5)
    form: str = "sorted"  # how tokens reach experts; also the plain "loop", "grouped"

    def __post_init__(self):
        check_choice(self, "kind", ROUTERS)
        check_choice(self, "form", FORMS_OF_MOE)
        check_flags(self, "selection_bias", "normalize")
        check_counts(self, "n_groups", "n_groups_active")
        check_positive(self, "scaling")
        require(
            self.n_groups_active <= self.n_groups,
            f"n_groups_active={self.n_groups_active} exceeds n_groups={self.n_groups}.",
            f"At most all {self.n_groups} groups can be open.",
        )

    def divides_by_sum(self) -> bool:
        """Whether the weights of a token are made to sum to 1 (times scaling)."""
        return self.kind == "softmax_renormalized" or (
            self.kind == "sigmoid" and self.normalize
        )

    def has_task_gradient(self, k: int) -> bool:
        """One weight divided by itself is 1: no task loss then trains the gate."""
        return k > 1 or not (self.kind == "softmax_selected" or self.divides_by_sum())

    def check(self, cfg):
        """Refuse a Config that this router cannot be built for."""
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
        self.check_groups(E, k)

    def check_groups(self, E: int, k: int):
        """Refuse E experts of which k cannot be chosen from the open groups."""
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
            f"Open more groups, or choose 1 to {open_experts} experts.",
        )
