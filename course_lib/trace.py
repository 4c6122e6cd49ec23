"""One recorded forward pass: the only source of shapes for text, tables, diagrams and tests."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from course_lib.model.attention import AttentionCore
from course_lib.model.decoder import Block, ModernDecoder
from course_lib.model.tap import Tap

__all__ = ["Divergence", "Stage", "Trace", "diverge", "expert_usage", "trace", "trace_block"]

MODEL_FILES = Path(sys.modules["course_lib.model.decoder"].__file__).parent
STREAM = "B T D"


@dataclass(frozen=True)
class Stage:
    """One tensor of a forward pass. Module 16."""

    name: str  # where in the model, for example "blocks.1.attn.q_rotated"
    axes: str  # a letter for each axis, as listed in course_lib.model
    value: Tensor  # detached
    flops: int  # of the matrix products since the stage before, a multiply-add as 2
    source: str  # file and line in course_lib/model that made it

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def nbytes(self) -> int:
        return self.value.numel() * self.value.element_size()

    def __repr__(self) -> str:
        return f"{self.name} {self.axes!r} {self.shape}"


class Trace:
    """The stages of one forward pass in order; look one up by name. Module 16."""

    def __init__(self, stages: list[Stage]):
        self.stages = stages
        self.by_name = {stage.name: stage for stage in stages}

    def __getitem__(self, name: str) -> Stage:
        if name not in self.by_name:
            near = [known for known in self.by_name if known.endswith(name.split(".")[-1])]
            raise KeyError(f"no stage {name!r}; of that ending there are {near[:8]}")
        return self.by_name[name]

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    def __len__(self) -> int:
        return len(self.stages)

    def under(self, prefix: str) -> "Trace":
        """The stages whose name begins with `prefix`, which is cut off."""
        cut = prefix if prefix.endswith(".") else prefix + "."
        return Trace(
            [
                Stage(s.name.removeprefix(cut), s.axes, s.value, s.flops, s.source)
                for s in self.stages
                if s.name.startswith(cut)
            ]
        )

    def table(self) -> str:
        """One line a stage: name, axes, shape, bytes, FLOPs."""
        rows = [
            f"{s.name:32} {s.axes:9} {str(s.shape):20} {s.nbytes:>10,} B {s.flops:>12,} FLOP"
            for s in self.stages
        ]
        return "\n".join(rows)


class Recorder:
    """Collects stages from hooks; FLOPs are read off torch's counter between stages."""

    def __init__(self, counter: FlopCounterMode | None):
        self.stages: list[Stage] = []
        self.counter, self.flops_before, self.flops_at_core = counter, 0, 0

    def flops_so_far(self) -> int:
        return self.counter.get_total_flops() if self.counter else 0

    def record(self, name: str, axes: str, value: Tensor, source: str | None = None):
        now = self.flops_so_far()
        stage = Stage(name, axes, value.detach(), now - self.flops_before, source or caller())
        self.flops_before = now
        self.stages.append(stage)

    def hook(self, name: str, axes: str):
        def after(module, args, out):  # of what MoE returns, the first is the stream
            self.record(name, axes, out[0] if isinstance(out, tuple) else out)

        return after

    def core_hook(self, core: AttentionCore, args):
        self.flops_at_core = self.flops_so_far()

    def explicit_hook(self, core: AttentionCore, args, fused: Tensor):
        """Run the form that has scores (its Taps record them) and hold it against the fused
        one. The FLOPs of the fused run are passed over: counted once, in the open form."""
        self.flops_before += self.flops_so_far() - self.flops_at_core
        explicit = core.explicit(*args)
        # a few roundings of the dtype, relative to the largest value
        allowed = 64 * torch.finfo(fused.dtype).eps * max(1.0, explicit.abs().max().item())
        torch.testing.assert_close(fused, explicit, atol=allowed, rtol=0)


def caller() -> str:
    """File and line in course_lib/model that called the watched module."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.parent == MODEL_FILES and path.name != "tap.py":
            return f"model/{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside course_lib/model"


def stage_name(path: str) -> str:
    """blocks.1.attn.core.see_scores is told as blocks.1.attn.scores."""
    for tap, told in (("core.see_k", "k_expanded"), ("core.see_v", "v_expanded")):
        if path.endswith(tap):
            return path.removesuffix(tap) + told
    return path.replace("see_", "").replace("core.", "")


def watched_block(block: Block) -> Iterator[tuple[str, nn.Module, str]]:
    """The modules of a block that make a stage: name, module and axes of what it returns."""
    for name in ("norm1", "attn", "norm2", "ffn"):
        yield name, getattr(block, name), STREAM
    for path, module in block.named_modules():
        if isinstance(module, Tap):
            yield stage_name(path), module, module.axes


def watched(model: ModernDecoder) -> Iterator[tuple[str, nn.Module, str]]:
    """The same for a whole decoder."""
    yield "embed", model.embed, STREAM
    for i, block in enumerate(model.blocks):
        for name, module, axes in watched_block(block):
            yield f"blocks.{i}.{name}", module, axes
    yield "norm_f", model.norm_f, STREAM
    yield "lm_head", model.lm_head, "B T V"


@contextmanager
def hooks(root: nn.Module, stages: Iterator, recorder: Recorder):
    with ExitStack() as stack:
        for name, module, axes in stages:
            handle = module.register_forward_hook(recorder.hook(name, axes))
            stack.callback(handle.remove)
        for module in root.modules():
            if isinstance(module, AttentionCore) and not module.makes_scores:
                stack.callback(module.register_forward_pre_hook(recorder.core_hook).remove)
                stack.callback(module.register_forward_hook(recorder.explicit_hook).remove)
        yield


def trace(
    model: ModernDecoder,
    ids: Tensor,
    caches: list | None = None,
    pos_offset: int = 0,
    attention_mask: Tensor | None = None,
    flops: bool = True,
) -> Trace:
    """Run `model` once and record every watched tensor, attention scores included.

    The scores come from the explicit form of attention, asserted equal to the form that
    the model uses. flops=False leaves them 0 and is faster. Module 16."""
    counter = FlopCounterMode(display=False) if flops else None
    recorder = Recorder(counter)
    recorder.record("ids", "B T", ids, source="input")
    with torch.no_grad(), hooks(model, watched(model), recorder), counter or nullcontext():
        model(ids, caches, pos_offset, attention_mask)
    return Trace(recorder.stages)


def trace_block(block: Block, x: Tensor, cos: Tensor, sin: Tensor) -> Trace:
    """Record one block by itself on any stream x (B, T, D); FLOPs stay 0. Module 16."""
    recorder = Recorder(None)
    with torch.no_grad(), hooks(block, watched_block(block), recorder):
        block(x, cos, sin)
    return Trace(recorder.stages)


@dataclass(frozen=True)
class Divergence:
    """The first stage at which two traces differ. Module 16."""

    name: str
    reason: str
    max_difference: float  # infinity where shapes or names differ

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def largest_difference(a: Tensor, b: Tensor) -> float:
    """max |a - b|, where equal infinities (masked scores) and NaN beside NaN differ by 0."""
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    gap = (a - b).abs().masked_fill(same, 0.0).nan_to_num(float("inf"))
    return gap.max().item() if gap.numel() else 0.0


def diverge(a: Trace, b: Trace, atol: float = 1e-5) -> Divergence | None:
    """Name the first stage of a whose value is not that of b within atol; None if all agree.

    Module 16."""
    for ours, theirs in zip(a, b, strict=False):
        if ours.name != theirs.name or ours.shape != theirs.shape:
            reason = f"{ours.shape} against {theirs.name} {theirs.shape}"
            return Divergence(ours.name, reason, float("inf"))
        largest = largest_difference(ours.value, theirs.value)
        if largest > atol:
            return Divergence(ours.name, f"largest difference {largest:.2g}", largest)
    if len(a) != len(b):
        longer = max(a, b, key=len)
        return Divergence(longer.stages[min(len(a), len(b))].name, "only in one", float("inf"))
    return None


def expert_usage(chosen: Tensor, n_experts: int) -> list[int]:
    """How many of the N k slots went to each expert: (N, k) indices to E counts. Module 12."""
    return chosen.flatten().bincount(minlength=n_experts).tolist()
