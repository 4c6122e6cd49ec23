"""Labels read off a trace: no shape is typed anywhere."""

import math

from course_lib.model import Config, ModernDecoder
from course_lib.model.checks import require
from course_lib.trace import Stage, Trace

from .shapes import Label

# What a cache entry is called in cache_spec, and the stage that made it.
CACHED = {"k": "k_rotated", "v": "v", "latent": "latent", "k_rope": "k_rope"}


class Reading:
    """One trace of one model, asked for labels by the names of its stages below `prefix`."""

    def __init__(self, model: ModernDecoder, trace: Trace, prefix: str = ""):
        self.model, self.trace, self.prefix = model, trace, prefix
        self.cfg: Config = model.cfg

    def stage(self, name: str) -> Stage:
        return self.trace[self.prefix + name]

    def stage_of(self, name: str) -> Stage:
        """A stage of the whole model, whatever the prefix."""
        return self.trace[name]

    def of(self, name: str) -> Label:
        """The label of a stage of the whole model."""
        stage = self.trace[name]
        return Label(stage.shape, stage.axes, stage=stage.name)

    def label(self, name: str, word: str = "") -> Label:
        """The shape and axes of a stage."""
        stage = self.stage(name)
        return Label(stage.shape, stage.axes, word, stage.name)

    def like(self, name: str, word: str = "", **sizes: int) -> Label:
        """The label of a stage with some axes of another size: like("v", T_S=9) has 9 keys."""
        stage = self.stage(name)
        letters, shape = stage.axes.split(), list(stage.shape)
        for change, size in sizes.items():
            old, new = change.split("_")
            shape[letters.index(old)] = size
            letters[letters.index(old)] = new
        return Label(tuple(shape), " ".join(letters), word)

    @property
    def keys(self) -> int:
        """S, the tokens that the queries of this layer met."""
        return self.stage("attn.scores").shape[-1]

    def cached(self, attention, read: bool) -> list[Label]:
        """What the layer writes to its cache, or reads back from it: a label for each name."""
        sizes = {"T_S": self.keys} if read else {}
        return [
            self.like(f"attn.{CACHED[name]}", word=name, **sizes) for name in attention.cache_spec()
        ]

    def bytes_a_token(self, attention) -> int:
        """What one token leaves in the cache of this layer."""
        size = self.stage("attn.q").value.element_size()
        return size * sum(math.prod(shape) for shape in attention.cache_spec().values())


def check_layer(model: ModernDecoder, layer: int, moe: bool = False) -> int:
    """The layer counted from 0, refused where there is none (or no experts in it)."""
    n = len(model.blocks)
    require(
        isinstance(layer, int) and -n <= layer < n,
        f"layer={layer!r}: the model has {n} layers.",
        f"Choose 0 to {n - 1}.",
    )
    with_experts = [i for i in range(n) if model.cfg.is_moe(i)]
    require(
        not moe or layer % n in with_experts,
        f"layer={layer} is dense: it has no router and no experts.",
        f"Choose from {with_experts}." if with_experts else "Build it with n_experts above 0.",
    )
    return layer % n


def check_trace(model: ModernDecoder, trace: Trace):
    """Refuse a trace that another model left."""
    depth = len({s.name.split(".")[1] for s in trace if s.name.startswith("blocks.")})
    vocabulary = trace["lm_head"].shape[-1]
    require(
        depth == len(model.blocks) and vocabulary == model.cfg.vocab_size,
        f"trace has {depth} blocks and {vocabulary} logits, the model "
        f"{len(model.blocks)} and {model.cfg.vocab_size}.",
        "Record it with trace(model, ids) of this model.",
    )


def plural(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"
