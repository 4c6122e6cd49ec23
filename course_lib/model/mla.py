"""Multi-head latent attention: one latent a token stands for all keys and values."""

import math

import torch
from torch import Tensor, nn

from .attention import AttentionCore, merge_heads, split_heads
from .config import Config
from .norm import RMSNorm
from .rope import rotation
from .tap import Tap


def query_projection(D: int, d_q: int, rank: int | None, eps: float) -> nn.Module:
    """D to d_q, straight or through a normalised bottleneck of width `rank`."""
    if rank is None:
        return nn.Linear(D, d_q, bias=False)
    down, up = nn.Linear(D, rank, bias=False), nn.Linear(rank, d_q, bias=False)
    return nn.Sequential(down, RMSNorm(rank, eps), up)


class MultiHeadLatentAttention(nn.Module):
    """Cache a latent c of width r and one rotated key; expand or absorb them per head.

    q_h = [q_nope, rope(q_rope)], k_h = [U_k c, rope(k_rope)], v_h = U_v c,
    scale 1 / sqrt(nope + rope). Absorbed: (q_nope U_k) c instead of q_nope (U_k c), so
    attention runs in the latent with one shared key head. x (B, T, D) to (B, T, D).
    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C. Module 09."""

    def __init__(self, cfg: Config, layer: int = 0):
        super().__init__()
        part, D = cfg.attention, cfg.d_model
        self.H, self.form = cfg.n_heads, part.form
        self.r, self.d_rope = part.kv_lora_rank, part.d_rope
        self.d_nope, self.d_value = part.d_nope, part.d_value
        d_q = self.H * (part.d_nope + part.d_rope)
        self.W_q = query_projection(D, d_q, part.q_lora_rank, cfg.norm_eps)
        self.W_dkv = nn.Linear(D, part.kv_lora_rank + part.d_rope, bias=False)
        self.kv_norm = RMSNorm(part.kv_lora_rank, cfg.norm_eps)
        self.W_uk = nn.Linear(part.kv_lora_rank, self.H * part.d_nope, bias=False)
        self.W_uv = nn.Linear(part.kv_lora_rank, self.H * part.d_value, bias=False)
        self.W_o = nn.Linear(self.H * part.d_value, D, bias=False)
        self.rotate = rotation(cfg.position, layer)
        # also when absorbed: the scores are the same ones
        scale = 1 / math.sqrt(part.d_nope + part.d_rope)
        widths = ("r+p", "r") if self.form == "absorbed" else ("h", "w")
        self.core = AttentionCore(cfg, scale, widths)
        self.see_q, self.see_heads = Tap("B H T h"), Tap("B H T w")
        self.see_latent, self.see_k_rope = Tap("B T r"), Tap("B T p")
        self.see_concat = Tap("B T Hw")

    def cache_spec(self) -> dict[str, tuple[int, ...]]:
        """What one token leaves behind in this layer: name to shape."""
        return {"latent": (self.r,), "k_rope": (self.d_rope,)}

    def score_widths(self) -> tuple[int, int]:
        """Width of a head's dot products, and of what the weights then sum."""
        if self.form == "absorbed":
            return self.r + self.d_rope, self.r
        return self.d_nope + self.d_rope, self.d_value

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache=None, mask=None
    ) -> Tensor:
        q = self.see_q(split_heads(self.W_q(x), self.H))
        q_nope, q_rope = q.split((self.d_nope, self.d_rope), dim=-1)
        latent, k_rope = self.W_dkv(x).split((self.r, self.d_rope), dim=-1)
        latent = self.see_latent(self.kv_norm(latent))
        q_rope = self.rotate(q_rope, cos, sin)
        # one key head for all: give it a head axis to rotate, then drop it
        k_rope = self.see_k_rope(self.rotate(k_rope.unsqueeze(1), cos, sin).squeeze(1))
        if cache is not None:
            latent, k_rope = cache.update(latent, k_rope)
        attend = self.absorbed if self.form == "absorbed" else self.naive
        heads = self.see_heads(attend(q_nope, q_rope, latent, k_rope, mask))
        return self.W_o(self.see_concat(merge_heads(heads)))

    def naive(self, q_nope, q_rope, latent, k_rope, mask):
        """Expand the latent to keys and values of every head: (B, H, S, ...)."""
        k_nope = split_heads(self.W_uk(latent), self.H)
        v = split_heads(self.W_uv(latent), self.H)
        k_rope = k_rope.unsqueeze(1).expand(-1, self.H, -1, -1)
        q, k = torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope), -1)
        return self.core(q, k, v, mask)

    def absorbed(self, q_nope, q_rope, latent, k_rope, mask):
        """Move U_k to the query and U_v behind the sum: keys, values are the latent."""
        U_k = self.W_uk.weight.unflatten(0, (self.H, -1))  # (H, nope, r)
        U_v = self.W_uv.weight.unflatten(0, (self.H, -1))  # (H, value, r)
        q = torch.cat((q_nope @ U_k, q_rope), -1)  # (B, H, T, r + rope)
        k = torch.cat((latent, k_rope), -1).unsqueeze(1)  # (B, 1, S, r + rope)
        out = self.core(q, k, latent.unsqueeze(1), mask)  # (B, H, T, r)
        return out @ U_v.transpose(-2, -1)
