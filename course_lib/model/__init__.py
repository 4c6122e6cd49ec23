"""What is computed: a decoder-only Transformer in plain torch.

Read the files in the order of the forward pass:

    config     every size, checked             (position, parts: the choices;
                                                checks: how bad input is refused)
    decoder    the map: embed, blocks, norm, head  (inputs: what a call may pass)
    norm       RMSNorm
    attention  grouped-query attention         (mla: the latent variant)
    rope       positions as rotations          (masks: who may see whom)
    ffn        SwiGLU
    moe        router and experts              (capacity: buffers of fixed size)
    tap        where inner tensors can be watched

Axis letters: B batch, T tokens of this call, S tokens attended to (cached + T), N = B T
tokens in one list, D d_model, H query heads, K key/value heads, h width of a head,
w width of a value head (MLA), r width of a latent, p width of the rotated key (MLA),
F SwiGLU width, E experts, k experts a token, V vocabulary.
"""

from .attention import AttentionCore, GroupedQueryAttention, merge_heads, split_heads
from .capacity import expert_capacity, keep_within_capacity
from .config import Config
from .decoder import Block, ModernDecoder, init_weights
from .ffn import SwiGLU
from .masks import (
    alibi_bias,
    causal_mask,
    document_mask,
    padded_causal_mask,
    positions_of,
)
from .mla import MultiHeadLatentAttention
from .moe import MoE, route
from .norm import RMSNorm
from .parts import GQA, MLA, Router
from .position import NTK, ALiBi, Interpolation, Llama3, Rope, YaRN
from .rope import (
    RotaryTable,
    apply_rope,
    half_split_order,
    inverse_frequencies,
    scaled_frequencies,
)
from .tap import Tap

__all__ = [
    "ALiBi",
    "AttentionCore",
    "Block",
    "Config",
    "GQA",
    "GroupedQueryAttention",
    "Interpolation",
    "Llama3",
    "MLA",
    "MoE",
    "ModernDecoder",
    "MultiHeadLatentAttention",
    "NTK",
    "RMSNorm",
    "Rope",
    "RotaryTable",
    "Router",
    "SwiGLU",
    "Tap",
    "YaRN",
    "alibi_bias",
    "apply_rope",
    "causal_mask",
    "document_mask",
    "expert_capacity",
    "half_split_order",
    "init_weights",
    "inverse_frequencies",
    "keep_within_capacity",
    "merge_heads",
    "padded_causal_mask",
    "positions_of",
    "route",
    "scaled_frequencies",
    "split_heads",
]
