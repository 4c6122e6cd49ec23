"""Module 05's own computations: sinusoids, published fields, SmolLM2 turned wrongly."""

import copy
import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from course_lib.model import ModernDecoder, inverse_frequencies
from course_lib.model.checks import require
from course_lib.teaching.wrong import StepByStep, with_mistakes
from course_lib.zoo.checkpoints import build_decoder


def sinusoid(positions: Tensor, d: int, base: float = 10000.0) -> Tensor:
    """sin and cos of position * base^(-2i/d), channels 2i and 2i + 1: (T,) to (T, d), float64.

    Source: Vaswani et al., arXiv 1706.03762, section 3.5. Module 05."""
    angles = positions.double().unsqueeze(-1) * inverse_frequencies(d, base)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


def closest_pair(codes: Tensor) -> tuple[int, int, float]:
    """The two rows of codes (T, d) that lie nearest to each other, and their distance.

    Module 05."""
    # the fast route through a matrix product rounds away what is looked for here
    gaps = torch.cdist(codes, codes, compute_mode="donot_use_mm_for_euclid_dist")
    gaps.fill_diagonal_(torch.inf)
    i, j = divmod(int(gaps.argmin()), len(codes))
    return min(i, j), max(i, j), float(gaps[i, j])


# Fields of published config.json files under their own names, of which only those that decide
# positions. Retrieved 2026-09-08; Gemma 4's are those of its global layers.
POSITION_FIELDS = {
    "Llama-3-8B": {"head_dim": 128, "rope_theta": 5e5},
    "Llama-3.1-8B": {
        "head_dim": 128,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "Qwen3-8B": {"head_dim": 128, "rope_theta": 1e6},
    "Qwen3-8B, stretched": {
        "head_dim": 128,
        "rope_theta": 1e6,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    },
    "Olmo-3-7B": {
        "head_dim": 128,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "DeepSeek-V3": {
        "qk_rope_head_dim": 64,
        "rope_theta": 1e4,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
        },
    },
    "Kimi-K2": {
        "qk_rope_head_dim": 64,
        "rope_theta": 5e4,
        "rope_scaling": {
            "type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
        },
    },
    "gpt-oss-20b": {
        "head_dim": 64,
        "rope_theta": 1.5e5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    },
    "GLM-4.5": {"head_dim": 128, "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    "MiniMax-M2": {"head_dim": 128, "rope_theta": 5e6, "rotary_dim": 64},
    "Qwen3-Next": {"head_dim": 256, "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "Gemma 4, global": {
        "head_dim": 512,
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "proportional"},
        "partial_rotary_factor": 0.25,
    },
    "SmolLM3-3B": {"head_dim": 128, "rope_theta": 5e6, "no_rope_layer_interval": 4},
}


# --- a trained model under other positions --------------------------------------------------

PARAGRAPH = (
    "The tide was out when they reached the bay. Anna took off her shoes and walked across the "
    "wet sand to the old lighthouse, while her brother stayed behind and watched the boats come "
    "home. In the evening the wind turned, the water rose again, and the two of them sat on the "
    "wall and counted the lights on the other side. When the last boat had been tied up, the "
    "fishermen carried their boxes to the market, and Anna bought two small fish for supper."
)


@torch.no_grad()
def text_loss(model: ModernDecoder, ids: Tensor, first: int = 0, pos_offset: int = 0) -> float:
    """Mean next-token loss in nats over the tokens after index `first`; ids (1, T). Module 05."""
    logits, _ = model(ids, pos_offset=pos_offset)
    return F.cross_entropy(logits[0, first:-1], ids[0, first + 1 :]).item()


def under(model: ModernDecoder, **changes) -> ModernDecoder:
    """A decoder on the very weights of `model` whose Config differs in `changes`.

    Raises ValueError if the Config refuses them. Module 05."""
    return build_decoder(dataclasses.replace(model.cfg, **changes), model.state_dict())


def keys_turned(model: ModernDecoder, turn) -> ModernDecoder:
    """A decoder on the weights of `model` that turns its keys (B, K, T, h) by turn(keys), and
    its queries as before. Module 05."""

    class KeysTurned(StepByStep):
        def norm_and_turn(self, x, norm, cos, sin):
            if norm is self.k_norm:
                return turn(norm(x))
            return super().norm_and_turn(x, norm, cos, sin)

    return with_mistakes(model, KeysTurned)


def spread(model: ModernDecoder, at: int, gap: int) -> ModernDecoder:
    """A decoder on the weights of `model` for which the tokens from index `at` on stand `gap`
    positions further: distances grow, the number of tokens does not.

    Raises ValueError for a negative gap. Module 05."""
    require(gap >= 0, f"gap={gap} is negative.", "Positions only grow: give 0 or more.")

    class Spread(type(model)):
        def place(self, ids, caches, pos_offset, attention_mask):
            positions, mask = super().place(ids, caches, pos_offset, attention_mask)
            return positions + gap * (positions >= at), mask

    other = copy.copy(model)
    other.__class__ = Spread
    return other


# --- which hands of the clock a trained head uses -------------------------------------------


def mean_hands(q: Tensor, k: Tensor, freq: Tensor) -> tuple[Tensor, Tensor]:
    """How strongly each pair of the average query and key speaks, and at which angle.

    q, k (T, d) before they are turned, half-split; freq (d/2,). The score of the averages at
    distance D is sum(strength * cos(D * freq + angle)). Both (d/2,), float64. Module 05."""
    require(
        q.shape == k.shape and q.shape[-1] == 2 * len(freq),
        f"q={tuple(q.shape)} and k={tuple(k.shape)} do not fit freq={tuple(freq.shape)}.",
        "Give one query and one key head of width 2 * len(freq).",
    )
    q_pair, k_pair = (torch.complex(*x.double().mean(0).chunk(2)) for x in (q, k))
    hands = q_pair * k_pair.conj() / q.shape[-1] ** 0.5
    return hands.abs(), hands.angle()
