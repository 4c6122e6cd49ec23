"""What a node tells when it is opened: formula, shapes, costs, the line of code, the module."""

import inspect
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import course_lib
from course_lib.model import (
    ALiBi,
    AttentionCore,
    Block,
    GroupedQueryAttention,
    ModernDecoder,
    MoE,
    MultiHeadLatentAttention,
    RMSNorm,
    RotaryTable,
    Router,
    SwiGLU,
    apply_rope,
    route,
)
from course_lib.serving import KVCache, generate, sample
from course_lib.trace import Trace, expert_usage

PACKAGE = Path(course_lib.__file__).parent


@dataclass(frozen=True)
class Part:
    """A step as the library describes it. `formula` quotes the docstring of `teacher`, or,
    where torch does the step and has no such docstring, is written here."""

    formula: str
    teacher: object  # its docstring names the module
    quoted: bool = True

    @property
    def kind(self) -> str:
        """A formula has signs; a sentence is told as a step."""
        return "formula" if set("=*(") & set(self.formula) else "step"

    @property
    def module(self) -> str:
        return re.findall(r"Module (\d\d)\.", self.teacher.__doc__)[-1]


def torch_step(formula: str, teacher: object) -> Part:
    return Part(formula, teacher, quoted=False)


PARTS = {
    "ids": Part("token ids (B, T) to logits (B, T, V)", ModernDecoder),
    "embedding": torch_step("x = E[id]: one row of E (V, D) for each token", ModernDecoder),
    "stream": Part("x + attention(norm(x)), then x + ffn(norm(x))", Block),
    "norm": Part("y = x / sqrt(mean(x^2) + eps) * g", RMSNorm),
    "project": torch_step("y = x W^T, then (B, T, n h) to (B, n, T, h)", GroupedQueryAttention),
    "attention": Part("QK-Norm per head, RoPE on q and k (never on v)", GroupedQueryAttention),
    "latent attention": Part(
        "q_h = [q_nope, rope(q_rope)], k_h = [U_k c, rope(k_rope)]", MultiHeadLatentAttention
    ),
    "absorb": Part("(q_nope U_k) c instead of q_nope (U_k c)", MultiHeadLatentAttention),
    "unfold": Part("k_h = [U_k c, rope(k_rope)], v_h = U_v c", MultiHeadLatentAttention),
    "latent": Part("Cache a latent c of width r and one rotated key", MultiHeadLatentAttention),
    "rope": Part("(a, b) of x to (a cos - b sin, b cos + a sin)", apply_rope),
    "table": Part("cos and sin of position * frequency", RotaryTable),
    "alibi": Part("head h adds -2^(-8 (h + 1) / H) * distance to its scores", ALiBi),
    "cache": Part("All tokens so far of one layer, in buffers written in place", KVCache),
    "expand": Part("query head h reading key/value head h // group", AttentionCore),
    "scores": Part("softmax(q k^T * scale + mask) v", AttentionCore),
    "concat": torch_step("(B, H, T, h) to (B, T, H h)", GroupedQueryAttention),
    "output": torch_step("y = x W_o^T: (B, T, H h) to (B, T, D)", GroupedQueryAttention),
    "swiglu": Part("W_down(silu(W_gate x) * W_up x)", SwiGLU),
    "moe": Part(
        "y = sum over the k chosen experts of weight * SwiGLU_e(x), plus shared experts", MoE
    ),
    "flatten": Part("N = B T tokens, each routed alone", MoE),
    "gate": torch_step("router logits = x W_gate^T: (N, D) to (N, E)", MoE),
    "route": Part("Choose k experts a token and weight them", route),
    "usage": Part("How many of the N k slots went to each expert", expert_usage),
    "head": torch_step("logits = x E^T: (B, T, D) to (B, T, V)", ModernDecoder),
    "decoder": Part("token ids (B, T) to logits (B, T, V)", ModernDecoder),
    "last": torch_step("logits[:, -1]: only the last position says what comes next", generate),
    "sample": Part(sample.__doc__.split(". ")[0].split("\n")[0].rstrip("."), sample),
    "loop": Part("Prompt and continuation, (B, T + n), n <= max_new_tokens", generate),
}


@dataclass(frozen=True)
class About:
    """Where a node's facts come from."""

    part: str  # a key of PARTS
    stages: tuple[str, ...] = ()  # of the trace, that this node makes
    source: str | None = None  # file:line, if no stage has it
    weights: object = None  # the module whose parameters it holds
    note: str = ""
    trace: Trace | None = None  # of the run it belongs to, if a diagram shows several


def router_line(kind: str) -> str:
    """What the docstring of Router says of a kind."""
    lines = [line.split(None, 1) for line in Router.__doc__.splitlines() if kind in line]
    return next(rest for first, rest in lines if first == kind)


@cache
def line_of(owner: object, text: str) -> str:
    """file:line of the first line with `text` in the source of a class or function."""
    lines, start = inspect.getsourcelines(owner)
    path = Path(inspect.getsourcefile(owner)).relative_to(PACKAGE)
    for offset, line in enumerate(lines):
        if text in line:
            return f"{path.as_posix()}:{start + offset}"
    raise ValueError(f"{text!r} is in no line of {owner.__qualname__}. Quote the source as it is.")


def code_at(source: str) -> str:
    """The line of the library at file:line."""
    name, _, number = source.partition(":")
    return (PACKAGE / name).read_text(encoding="utf-8").splitlines()[int(number) - 1].strip()


def facts(about: About, title: str, trace: Trace, into: list[str], out: list[str]) -> dict:
    """The side panel of one node as plain text, in the order in which it is shown."""
    part = PARTS[about.part]
    trace = about.trace or trace
    stages = [trace[name] for name in about.stages]
    source = about.source or (stages[-1].source if stages else None)
    weights = sum(p.numel() for p in about.weights.parameters()) if about.weights else 0
    rows = {part.kind: part.formula, "in": "\n".join(into), "out": "\n".join(out)}
    if stages:
        rows["bytes"] = f"{sum(stage.nbytes for stage in stages):,} of what comes out"
        rows["FLOPs"] = f"{sum(stage.flops for stage in stages):,} in matrix products"
    if weights:
        rows["weights"] = f"{weights:,}"
    if source and ":" in source:
        rows["source"], rows["code"] = f"course_lib/{source}", code_at(source)
    if about.note:
        rows["note"] = about.note
    rows["taught in"] = f"module {part.module}"
    return {"title": title, "rows": {key: value for key, value in rows.items() if value}}
