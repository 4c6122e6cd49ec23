"""The decoder in fewer and larger operations: what `generate` runs unless told otherwise.

`model/` says what is computed; the numbers here equal its to 1e-5. Six things differ:

1. No module is called and no gradient recorded: functions over the weights. An operation on one
   token takes about a microsecond whatever it computes, so that their number is the price.
2. q, k and v are written side by side into one buffer. QK-Norm and RoPE then run once for all
   heads, and one copy takes keys and values into a cache that was allocated at the start.
3. For one new token, the query heads that share a key head are the rows of a small matrix: the
   cached keys are read once a group, and never repeated. They lie with the tokens last, (h, S).
4. One token visits its k experts by number. Many tokens are sorted by expert, so that each expert
   runs once over a slice and an expert that nobody chose does not run.
5. Results are added where they belong by the product itself: x + h W is one operation.
6. A prompt needs logits at its end only, so in the last block all other tokens leave their keys
   and values and nothing else.

The weights are the model's own, not copies: a training step or `load_state_dict` changes both
forms at once. What this form does not cover, `why_not_fast` says in a sentence.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.model import (
    Block,
    GroupedQueryAttention,
    ModernDecoder,
    MoE,
    RMSNorm,
    Rope,
    RotaryTable,
    SwiGLU,
    Tap,
    apply_rope,
)
from course_lib.model.attention import AttentionCore
from course_lib.model.checks import require
from course_lib.model.moe import COMBINE

COVERED = (
    ModernDecoder,
    Block,
    GroupedQueryAttention,
    AttentionCore,
    RMSNorm,
    SwiGLU,
    MoE,
    RotaryTable,
    Tap,
    nn.Linear,
    nn.Embedding,
    nn.ModuleList,
    nn.Identity,
)


def why_not_fast(model) -> str | None:
    """Why `model` can only be run in the readable form, as a sentence; None if it need not.

    Not only the Config decides: a replaced layer, a hook or another forward would go unseen
    here, and what the student changed must be what runs. Module 11."""
    position = model.cfg.position
    if not (isinstance(position, Rope) and is_plain(position)):
        return f"position={position}: only whole heads turned in half-split pairs are covered."
    if model.embed.weight.dtype not in (torch.float32, torch.float64):
        return f"dtype={model.embed.weight.dtype}: norms would not be computed in float32."
    return what_was_changed(model)


def is_plain(position: Rope) -> bool:
    whole = position.fraction == 1.0 and not position.proportional
    return position.pairing == "half" and whole and position.nope_every is None


def what_was_changed(model) -> str | None:
    """The first module that does not run the library's own code, as a sentence."""
    dtype = model.embed.weight.dtype
    for name, module in model.named_modules():
        kind = type(module)
        if kind not in COVERED:
            return f"{name or 'the model'} is a {kind.__name__}, which has no fast form."
        if package_of(kind.forward) != package_of(kind) or "forward" in vars(module):
            return f"{name or 'the model'} runs another forward than the library's."
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name or 'the model'} has a forward hook, which would not be called."
        if any(w.dtype != dtype for w in module._parameters.values() if w is not None):
            return f"{name} has another dtype than the embedding's {dtype}."
        if kind in DETAILS and (reason := DETAILS[kind](module)):
            return f"{name}: {reason}"
    return None


def why_not_core(core: AttentionCore) -> str | None:
    if core.window is not None or core.sinks is not None:
        return "a window or sinks need a mask or the explicit scores."
    return None if core.form == "sdpa" else "form='explicit' asks for scores to look at."


def why_not_attention(attn: GroupedQueryAttention) -> str | None:
    rotates = getattr(attn.rotate, "func", None) is apply_rope
    return None if rotates else "it rotates by another function."


def why_not_moe(moe: MoE) -> str | None:
    own = package_of(COMBINE[moe.router.form]) == package_of(MoE)
    return None if own else "experts are combined by another function."


DETAILS = {
    AttentionCore: why_not_core,
    GroupedQueryAttention: why_not_attention,
    MoE: why_not_moe,
}


def package_of(thing) -> str:
    return thing.__module__.split(".")[0]


class FastDecoder:
    """`model` with room for `capacity` tokens in each of `batch` rows.

    `step` takes the next ids (B, T) and returns the logits (B, V) behind the last of them: first
    a prompt of any T, then T = 1. Raises ValueError for what does not fit. Module 11."""

    @torch.inference_mode()
    def __init__(self, model, batch: int, capacity: int):
        reason = why_not_fast(model)
        require(reason is None, str(reason), "Use generate(..., engine='readable').")
        self.batch, self.capacity, self.length = batch, capacity, 0
        self.embed, self.head = model.embed.weight, model.lm_head.weight
        self.layers = [FastBlock(block, batch, capacity) for block in model.blocks]
        self.norm_f = FastNorm([model.norm_f])
        self.attn = model.blocks[0].attn  # all are of one shape
        self.room = Projected(self.attn, batch, 1)
        self.cos, self.sin = doubled(*model.rope(torch.arange(capacity)), self.embed)

    @torch.inference_mode()
    def step(self, ids: Tensor) -> Tensor:
        T, start = ids.shape[1], self.length
        self.check_room(ids)
        self.length = end = start + T
        cos, sin = self.cos[start:end], self.sin[start:end]
        x = F.embedding(ids, self.embed).flatten(0, 1)  # (N, D) from here on
        room = self.room if T == 1 else Projected(self.attn, self.batch, T)
        for layer in self.layers[:-1]:
            x = layer(x, start, cos, sin, room, queries=T)
        x = self.layers[-1](x, start, cos, sin, room, queries=1)
        return F.linear(self.norm_f(x), self.head)

    def check_room(self, ids: Tensor):
        T, start = ids.shape[1], self.length
        require(
            ids.shape[0] == self.batch and start + T <= self.capacity,
            f"ids={tuple(ids.shape)} after {start} tokens do not fit batch={self.batch}, "
            f"capacity={self.capacity}.",
            "Make a FastDecoder of that size.",
        )
        require(
            T == 1 or start == 0,
            f"ids={tuple(ids.shape)} is a chunk of T={T} tokens after {start} cached ones.",
            "Give the prompt first and as a whole, then one token at a time.",
        )


def doubled(cos: Tensor, sin: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Tables (S, 1, h) with which RoPE is x cos + (x rolled by half a head) sin.

    Rolling puts b where a was and a where b was; the sign of a cos - b sin is in the table."""
    cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return cos.to(like.dtype).unsqueeze(1), sin.to(like.dtype).unsqueeze(1)


class FastNorm:
    """RMSNorm of several gains side by side: x (..., n, d) or, for one gain, (..., d).

    sqrt(|x|^2 + d eps) is the hypotenuse of |x| and sqrt(d eps), and sqrt(d) is in the gain:
    four operations, and a third of the passes over x that the formula takes."""

    def __init__(self, norms: list):
        d, eps = norms[0].weight.numel(), norms[0].eps
        gain = torch.stack([norm.weight for norm in norms]).squeeze(0)
        self.gain = gain * math.sqrt(d)
        self.least = gain.new_tensor(math.sqrt(d * eps))

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x / torch.hypot(length, self.least)).mul_(self.gain)


def transposed(linear: nn.Linear) -> Tensor:
    """The weight as a right factor, (in, out): a view."""
    return linear.weight.t()


FEW = 4  # up to so many rows no weight is read ahead, and an expert's is the left factor


def product(x: Tensor, W: Tensor, out: Tensor | None = None) -> Tensor:
    """x W; for more than a few rows, W is read ahead.

    The value of the sum is not used: making it reads W in the order in which it lies, as fast
    as memory gives. The product walks along several rows at once and would wait at each."""
    if len(x) > FEW:
        W.sum()
    return torch.mm(x, W, out=out)


def add_product(x: Tensor, h: Tensor, W: Tensor, weight: float = 1.0) -> Tensor:
    """x + weight * h W, W read ahead as in `product`."""
    if len(h) > FEW:
        W.sum()
    return torch.addmm(x, h, W, alpha=weight)


class Projected:
    """Room for q, k and v of N = B T tokens side by side, and the views that are taken of it."""

    def __init__(self, attn: GroupedQueryAttention, B: int, T: int):
        H, K, h = attn.H, attn.H_kv, attn.d_head
        rows = attn.W_q.weight.new_empty(B * T, (H + 2 * K) * h)
        self.parts = rows.split((H * h, K * h, K * h), dim=1)
        heads = rows.view(B, T, H + 2 * K, h)
        self.q, self.qk = heads[:, :, :H], heads[:, :, : H + K]
        self.k, self.v = heads[:, :, H:].transpose(1, 2).split(K, dim=1)  # (B, K, T, h)


class FastBlock:
    """One block over N = B T tokens x (N, D), and the cache of its keys and values."""

    def __init__(self, block: Block, batch: int, capacity: int):
        attn = block.attn
        self.B, self.H, self.K, self.h = batch, attn.H, attn.H_kv, attn.d_head
        self.scale = attn.core.scale
        self.norm1, self.norm2 = FastNorm([block.norm1]), FastNorm([block.norm2])
        self.W_o = transposed(attn.W_o)
        self.projections = [transposed(W) for W in (attn.W_q, attn.W_k, attn.W_v)]
        normed = isinstance(attn.q_norm, RMSNorm)
        heads = [attn.q_norm] * self.H + [attn.k_norm] * self.K
        self.qk_norm = FastNorm(heads) if normed else nn.Identity()
        # keys with the tokens last: a row of scores is then a sum of long rows, read in order
        self.keys = self.W_o.new_empty(batch, self.K, self.h, capacity)
        self.values = self.W_o.new_empty(batch, self.K, capacity, self.h)
        self.nothing = self.keys.new_empty(1, 1, 1)
        self.ffn = FastMoE(block.ffn) if block.is_moe else FastSwiGLU(*matrices_of(block.ffn))

    def __call__(self, x: Tensor, start: int, cos: Tensor, sin: Tensor, room, queries: int):
        """All tokens leave keys and values; the last `queries` of each row go on."""
        end = start + len(cos)
        q = self.remember(self.norm1(x), start, end, cos, sin, room)[:, -queries:]
        heads = self.attend_one(q, end) if queries == 1 else self.attend(q, room)
        if len(heads) < len(x):
            x = x.unflatten(0, (self.B, -1))[:, -queries:].flatten(0, 1)
        x = add_product(x, heads, self.W_o)
        return self.ffn(x, self.norm2(x))

    def remember(self, x: Tensor, start: int, end: int, cos, sin, room) -> Tensor:
        """Write k and v of the new tokens to the cache; return their q (B, T, H, h)."""
        for W, part in zip(self.projections, room.parts, strict=True):
            product(x, W, out=part)
        qk = self.qk_norm(room.qk)
        torch.addcmul(qk * cos, qk.roll(self.h // 2, -1), sin, out=room.qk)
        self.keys[..., start:end] = room.k.transpose(2, 3)
        self.values[:, :, start:end] = room.v
        return room.q

    def attend_one(self, q: Tensor, end: int) -> Tensor:
        """Softmax attention of a query a row, q (B, 1, H, h), to all `end` tokens: (B, H h).

        It sees everything, so that the heads of a group can be the rows of one matrix."""
        keys, values = self.keys.flatten(0, 1)[..., :end], self.values.flatten(0, 1)[:, :end]
        q = q.reshape(len(keys), -1, self.h)  # (B K, H / K, h)
        scores = torch.baddbmm(self.nothing, q, keys, beta=0, alpha=self.scale)
        return torch.bmm(scores.softmax(-1), values).view(self.B, -1)

    def attend(self, q: Tensor, room) -> Tensor:
        """Causal attention inside a prompt, q (B, T, H, h), whose keys are all in the room."""
        heads = F.scaled_dot_product_attention(
            q.transpose(1, 2), room.k, room.v, is_causal=True, scale=self.scale, enable_gqa=True
        )
        return heads.transpose(1, 2).reshape(-1, self.H * self.h)


FEW = 4  # rows up to which a weight is better read as the left factor


def matrices_of(ffn: SwiGLU) -> tuple[Tensor, Tensor, Tensor]:
    return ffn.w_gate.weight, ffn.w_up.weight, ffn.w_down.weight


class FastSwiGLU:
    """The three products of a SwiGLU, added to x or alone."""

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor):
        self.gate, self.up, self.down = gate.t(), up.t(), down.t()

    def inner(self, h: Tensor) -> Tensor:
        return F.silu(product(h, self.gate)).mul_(product(h, self.up))

    def __call__(self, x: Tensor, h: Tensor, weight: float = 1.0) -> Tensor:
        """x + weight * SwiGLU(h), the sum made by the last product."""
        return add_product(x, self.inner(h), self.down, weight)

    def visit(self, rows: Tensor) -> Tensor:
        """SwiGLU of the few or many rows that chose this expert.

        With few, W rows^T reads the weight in the order in which it lies, and waits less for
        memory than rows W^T does (measured: a tenth of a step at batch 8)."""
        if len(rows) > FEW:
            return product(self.inner(rows), self.down)
        gate, up = (torch.mm(W.t(), rows.t()) for W in (self.gate, self.up))  # (F, n)
        inner = rows.new_empty(len(rows), len(gate))
        torch.mul(F.silu(gate), up, out=inner.t())
        return torch.mm(self.down.t(), inner.t()).t()


class FastMoE:
    """x + the shared and the chosen experts of h; the choice itself is the model's `route`."""

    def __init__(self, moe: MoE):
        self.route, self.gate = moe.route, transposed(moe.gate)
        self.experts = [FastSwiGLU(*matrices_of(expert)) for expert in moe.experts]
        self.shared = [FastSwiGLU(*matrices_of(expert)) for expert in moe.shared]

    def __call__(self, x: Tensor, h: Tensor) -> Tensor:
        for expert in self.shared:
            x = expert(x, h)
        weights, chosen = self.route(torch.mm(h, self.gate))
        weights = weights.to(x.dtype)
        if len(h) > 1:
            return visit_sorted(self.experts, x, h, weights, chosen)
        for weight, e in zip(weights[0].tolist(), chosen[0].tolist(), strict=True):
            x = self.experts[e](x, h, weight)
        return x


def visit_sorted(experts: list, x: Tensor, h: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """x + the N k visits in the order of the experts, each expert on one slice of them."""
    slots = chosen.flatten()
    order = slots.argsort(stable=True)
    token = order // chosen.shape[1]
    counts = slots.bincount(minlength=len(experts)).tolist()
    rows = h.index_select(0, token)
    for expert, own in zip(experts, rows.split(counts), strict=True):
        if len(own):
            own.copy_(expert.visit(own))
    rows.mul_(weights.flatten()[order].unsqueeze(-1))
    return x.index_add(0, token, rows)
