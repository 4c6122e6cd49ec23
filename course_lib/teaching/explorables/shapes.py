"""Shape explorer: sizes turned into shapes, counts and maps of a real forward pass."""

from dataclasses import dataclass

import torch
from torch import Tensor

from course_lib.model import Config, ModernDecoder
from course_lib.teaching.explore import Explorable, Slider
from course_lib.teaching.panels import Bars, Heat, Note
from course_lib.trace import Stage, Trace, expert_usage, trace
from course_lib.zoo.counts import ParameterCount, cache_bytes, count_parameters, forward_flops

HEADS, KV_HEADS, EXPERTS = (4, 8, 16), (1, 2, 4, 8, 16), (4, 8, 16, 32)
TOKENS, BATCH, LAYERS = 64, 8, 32  # at most
RUN_LAYERS = 2  # a dense block and an MoE block: further ones have the shapes of the second
SEED = 0
COLUMNS = 3  # of the table of shapes
# fields of ParameterCount, and what the bars call them
PARTS = {
    "embedding": "embed",
    "attention": "attn",
    "norms": "norms",
    "dense_ffn": "dense",
    "router": "router",
    "routed": "routed",
    "shared": "shared",
}


@dataclass(frozen=True)
class Computed:
    """Counts of the whole Config, and the trace of its first two blocks."""

    cfg: Config
    count: ParameterCount
    flops: int  # of all B T tokens
    cache: int  # bytes
    recorded: Trace
    usage: list[int]


def config(heads: int, kv_heads: int, experts: int, top_k: int, layers: int) -> Config:
    return Config(
        n_heads=heads,
        n_kv_heads=kv_heads,
        n_experts=experts,
        n_experts_active=top_k,
        n_layers=layers,
    )


class WeightBank:
    """Weights of the largest model, drawn once; smaller models use the first rows of each."""

    def __init__(self):
        self.drawn: dict[str, Tensor] | None = None

    def largest(self) -> dict[str, Tensor]:
        if self.drawn is None:
            cfg = config(HEADS[-1], KV_HEADS[-1], EXPERTS[-1], 2, RUN_LAYERS)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(SEED)
                self.drawn = ModernDecoder(cfg).state_dict()
        return self.drawn

    def model(self, cfg: Config) -> ModernDecoder:
        """The decoder of `cfg` on views of the bank: nothing is drawn and nothing copied."""
        with torch.device("meta"):
            model = ModernDecoder(cfg, init=None)
        bank = self.largest()
        views = {
            name: bank[name][tuple(slice(size) for size in wanted.shape)]
            for name, wanted in model.state_dict().items()
        }
        model.load_state_dict(views, assign=True)
        return model


def compute(bank: WeightBank, batch, tokens, heads, kv_heads, experts, top_k, layers) -> Computed:
    cfg = config(heads, kv_heads, experts, top_k, layers)
    run = config(heads, kv_heads, experts, top_k, min(layers, RUN_LAYERS))
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(cfg.vocab_size, (BATCH, TOKENS), generator=generator)[:batch, :tokens]
    recorded = trace(bank.model(run), ids, flops=False)
    kept = [light(stage) for stage in recorded]
    chosen = recorded["blocks.1.ffn.chosen"].value
    return Computed(
        cfg=cfg,
        count=count_parameters(cfg),
        flops=batch * forward_flops(cfg, tokens),
        cache=cache_bytes(cfg, tokens, batch),
        recorded=Trace(kept),
        usage=expert_usage(chosen, experts),
    )


def light(stage: Stage) -> Stage:
    """The stage with its shape; values only of the weights that a panel shows."""
    shown = stage.name == "blocks.1.attn.weights"
    value = stage.value[:1].clone() if shown else torch.empty((), device="meta")
    # expanded, not copied: the shape stays that of the whole batch
    return Stage(stage.name, stage.axes, value.expand(stage.shape), stage.flops, stage.source)


def view(data: Computed, heads: int, kv_heads: int):
    return [
        [shapes_panel(data)],
        [parameters_panel(data), usage_panel(data), weights_panel(data, heads, kv_heads)],
    ]


def shapes_panel(data: Computed) -> Note:
    """Every stage from ids to logits; of the blocks, the second."""
    listed = [s for s in data.recorded if not s.name.startswith("blocks.0.")]
    high = -(-len(listed) // COLUMNS)
    columns = [aligned(listed[i : i + high]) for i in range(0, len(listed), high)]
    columns[-1] += [""] * (high - len(columns[-1]))
    lines = ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]
    others = data.cfg.n_layers - RUN_LAYERS
    more = f"; {others} more blocks have them too" if others else ""
    return Note("\n".join(lines), title=f"Shapes from ids to logits, inside block 1{more}")


def aligned(stages: list[Stage]) -> list[str]:
    """One line a stage, as narrow as its column allows: name, axes, shape."""
    cells = [
        (short(s.name), str(s.axes), f"({','.join(map(str, s.shape))})".replace(" ", ""))
        for s in stages
    ]
    wide = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [" ".join(f"{c:{w}}" for c, w in zip(row, wide, strict=True)) for row in cells]


def short(name: str) -> str:
    return name.removeprefix("blocks.1.")


def parameters_panel(data: Computed) -> Bars:
    count = data.count
    active = [getattr(count, part) for part in PARTS]
    active[list(PARTS).index("routed")] = count.routed_active
    idle = [getattr(count, part) - met for part, met in zip(PARTS, active, strict=True)]
    return Bars(
        [active, idle],
        list(PARTS.values()),
        title=f"A token meets {count.active / count.total:.1%} of all",
        ylabel="parameters",
        names=["met by a token", "other experts"],
        roles=["experts", "stream"],
        fmt="compact",
        width=1.45,
    )


def usage_panel(data: Computed) -> Bars:
    usage, slots = data.usage, sum(data.usage)
    busiest = max(range(len(usage)), key=usage.__getitem__)
    return Bars(
        usage,
        [str(e) for e in range(len(usage))],
        title=f"Expert {busiest}: {usage[busiest]} of {slots} slots",
        xlabel="expert of block 1",
        ylabel="slots",
        roles=[f"expert {e}" for e in range(len(usage))],
        reference=slots / len(usage),
        reference_label=f"even: {slots / len(usage):.4g}",
    )


def weights_panel(data: Computed, heads: int, kv_heads: int) -> Heat:
    weights = data.recorded["blocks.1.attn.weights"].value[0]  # (H, T, S) of the first text
    T, group = weights.shape[-1], heads // kv_heads
    return Heat(
        weights,
        title=f"{group} query heads share keys" if group > 1 else "Each head has its own keys",
        xlabel="key s",
        ylabel="query t",
        names=[f"h {h}" for h in range(heads)],
        limits=(0, 1),
        hidden=torch.ones(T, T, dtype=torch.bool).triu(1),
        width=1.2,
    )


def summary(data: Computed) -> str:
    count = data.count
    return (
        f"{count.total:,} parameters, {count.active:,} active; {data.flops:,} FLOP; "
        f"cache {data.cache:,} B; slots {data.usage}"
    )


def finding(data: Computed, batch: int, tokens: int) -> str:
    count = data.count
    return (
        f"A token meets {count.active:,} of {count.total:,} parameters; {batch} x {tokens} tokens "
        f"cost {data.flops / 1e9:.3f} GFLOP, {data.cache:,} bytes of cache."
    )


def code(heads: int, kv_heads: int, experts: int, top_k: int, layers: int) -> str:
    return (
        f"Config(n_layers={layers}, n_heads={heads}, n_kv_heads={kv_heads}, "
        f"n_experts={experts}, n_experts_active={top_k})"
    )


def invariants(data: Computed, batch, tokens, heads, kv_heads, experts, top_k):
    cfg, recorded = data.cfg, data.recorded
    weights, square = recorded["blocks.1.attn.weights"].value, (batch, heads, tokens, tokens)
    per_token = 2 * cfg.n_layers * kv_heads * cfg.d_head * torch.bfloat16.itemsize
    return [
        ("rows of weights sum to 1", bool(((weights.sum(-1) - 1).abs() < 1e-5).all())),
        ("no token sees a later one", not weights.triu(1).any()),
        ("slots = tokens x k", sum(data.usage) == batch * tokens * top_k),
        *(
            (f"{name} are B H T T", recorded[f"blocks.1.attn.{name}"].shape == square)
            for name in ("scores", "weights")
        ),
        ("logits are B T V", recorded["lm_head"].shape == (batch, tokens, cfg.vocab_size)),
        ("cache = 2 L K h bytes a token", data.cache == batch * tokens * per_token),
        ("active at most total", data.count.active <= data.count.total),
    ]


def shape_explorer() -> Explorable:
    """Seven sizes: every shape, parameters, FLOPs, cache bytes, usage and attention. Module 16."""
    bank = WeightBank()

    def compute_state(batch, tokens, heads, kv_heads, experts, top_k, layers):
        return compute(bank, batch, tokens, heads, kv_heads, experts, top_k, layers)

    return Explorable(
        "shapes",
        compute_state,
        view,
        summary,
        controls={
            "heads": Slider(8, values=HEADS, label="query heads (H)"),
            "kv_heads": Slider(2, values=KV_HEADS, label="key/value heads (K)"),
            "experts": Slider(8, values=EXPERTS, label="experts (E)"),
            "top_k": Slider(2, 1, 8, label="experts a token (k)"),
            "layers": Slider(4, 2, LAYERS, label="layers (L)"),
            "batch": Slider(1, 1, BATCH, label="texts (B)"),
            "tokens": Slider(6, 1, TOKENS, label="tokens a text (T)"),
        },
        title="What do the sizes cost, and which shapes do they make?",
        alt=finding,
        code=code,
        invariants=invariants,
        runs="model",
        height=376,
    )
