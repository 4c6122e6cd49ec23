"""Every size of a decoder, checked when it is written down."""

from dataclasses import dataclass, field

from .checks import (
    check_counts,
    check_flags,
    check_part,
    check_positive,
    check_whole,
    require,
)
from .parts import GQA, MLA, Router
from .position import ALiBi, Rope

COUNTS = (
    "vocab_size",
    "d_model",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "d_head",
    "d_ff",
    "n_experts_active",
    "d_expert",
    "max_seq_len",
)


@dataclass(frozen=True)
class Config:
    """Every size of a `ModernDecoder`, then a small dataclass for each swappable part.

    Raises ValueError naming field, value and rule. Module 16."""

    vocab_size: int = 1000  # V, rows of the embedding
    d_model: int = 256  # D, width of the residual stream
    n_layers: int = 4  # blocks
    n_heads: int = 8  # H, query heads
    n_kv_heads: int = 2  # K, key/value heads; H / K query heads share one
    d_head: int = 32  # h, width of a head (independent of D / H)
    d_ff: int = 512  # F, SwiGLU width in dense layers
    n_experts: int = 8  # E, routed experts; 0 makes every layer dense
    n_experts_active: int = 2  # k, experts a token goes to
    n_shared_experts: int = 1  # experts that every token goes to
    d_expert: int = 128  # SwiGLU width of one expert
    first_k_dense: int = 1  # this many first layers are dense
    rope_theta: float = 10000.0  # RoPE's base
    max_seq_len: int = 512  # positions available
    norm_eps: float = 1e-6  # added to the mean square inside RMSNorm's root

    attention: GQA | MLA = field(default_factory=GQA)
    position: Rope | ALiBi = field(default_factory=Rope)
    router: Router = field(default_factory=Router)
    tied: bool = True  # lm_head's weight is the embedding

    def __post_init__(self):
        check_counts(self, *COUNTS)
        for name in ("n_experts", "n_shared_experts", "first_k_dense"):
            check_whole(self, name, least=0)
        check_positive(self, "rope_theta", "norm_eps")
        check_part(self, "attention", (GQA, MLA))
        check_part(self, "position", (Rope, ALiBi))
        check_part(self, "router", (Router,))
        check_flags(self, "tied")
        self.check_together()

    def check_together(self):
        """The rules that tie one field to another."""
        require(
            self.rope_theta > 1,
            f"rope_theta={self.rope_theta} is not above 1.",
            "The frequencies fall as its powers: 10000.0 is usual.",
        )
        require(
            self.first_k_dense <= self.n_layers,
            f"first_k_dense={self.first_k_dense} exceeds n_layers={self.n_layers}.",
            f"At most all {self.n_layers} layers can be dense.",
        )
        self.attention.check(self)
        if self.n_experts:
            self.router.check(self)

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.n_heads // self.n_kv_heads

    @property
    def d_rotated(self) -> int:
        """Channels of a head that RoPE's table covers; 0 without RoPE."""
        return self.attention.d_rotated(self)

    def is_moe(self, layer: int) -> bool:
        """Whether block `layer` routes its tokens to experts."""
        return self.n_experts > 0 and layer >= self.first_k_dense

    @property
    def n_moe_layers(self) -> int:
        """Blocks that route."""
        return sum(self.is_moe(layer) for layer in range(self.n_layers))
