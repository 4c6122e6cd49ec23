"""A modern decoder-only Transformer to read, run and take apart; imports torch and nothing more.

`model` is what is computed, `serving` runs it token by token, `training` fits it; `trace`
records a forward pass, `zoo` counts and loads models, `teaching` draws and checks.
`python -m course_lib` prints a report of all of it.
"""

from .model import (
    GQA,
    MLA,
    NTK,
    ALiBi,
    Block,
    Config,
    GroupedQueryAttention,
    Interpolation,
    Llama3,
    ModernDecoder,
    MoE,
    MultiHeadLatentAttention,
    RMSNorm,
    Rope,
    Router,
    SwiGLU,
    YaRN,
    apply_rope,
    causal_mask,
    route,
)
from .serving import (
    KVCache,
    RollingCache,
    generate,
    left_pad,
    new_caches,
    next_token_probabilities,
    sample,
)
from .training import (
    StepReport,
    balance_loss,
    load_balancing_loss,
    losses,
    next_token_loss,
    training_step,
)

__all__ = [
    "ALiBi",
    "Block",
    "Config",
    "GQA",
    "GroupedQueryAttention",
    "Interpolation",
    "KVCache",
    "Llama3",
    "MLA",
    "MoE",
    "ModernDecoder",
    "MultiHeadLatentAttention",
    "NTK",
    "RMSNorm",
    "RollingCache",
    "Rope",
    "Router",
    "StepReport",
    "SwiGLU",
    "YaRN",
    "apply_rope",
    "balance_loss",
    "causal_mask",
    "generate",
    "left_pad",
    "load_balancing_loss",
    "losses",
    "new_caches",
    "next_token_loss",
    "next_token_probabilities",
    "route",
    "sample",
    "training_step",
]
