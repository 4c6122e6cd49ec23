"""Explorables of module 09: sharing heads, sizing caches, the cell of MLA, intensity, SmolLM2."""

import math
from functools import lru_cache, partial

import numpy as np
import torch
import torch.nn.functional as F

from course_lib.model import MLA, Config, ModernDecoder, split_heads
from course_lib.model.checks import require
from course_lib.teaching.explorables.trained import smollm2, tokens_of, visible
from course_lib.teaching.explore import Choice, Explorable, Slider, Text, Toggle
from course_lib.teaching.lessons import heads as lesson
from course_lib.teaching.lessons.heads_figures import (
    cell_sketch,
    head_graph,
    sketch_png,
    sketch_svg,
)
from course_lib.teaching.panels import Bars, Heat, Lines, Picture
from course_lib.trace import trace
from course_lib.training import next_token_loss
from course_lib.zoo.configs import cached, kv, published
from course_lib.zoo.counts import cache_bytes, cache_values, meta_attention

GIB = 2**30


def picture(sketch, **more) -> Picture:
    return Picture(sketch_svg(sketch), partial(sketch_png, sketch), **more)


def in_bytes(n: float) -> str:
    """1536 as 1.5 KiB."""
    for size, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if n >= size:
            return f"{n / size:,.4g} {name}"
    return f"{n:,.0f} B"


# --- sharing ----------------------------------------------------------------------------------

ORDERS = ("in place: 0 0 1 1", "tiled: 0 1 0 1 (wrong)")
TOKENS, WIDTH = 6, 8  # of the small attention that measures an order


def kind_of(H: int, K: int) -> str:
    return "MHA" if K == H else "MQA" if K == 1 else f"GQA, groups of {H // K}"


def compute_sharing(H: int, K: int, order: str, h: int, L: int, tokens: int) -> dict:
    lesson.group_of(H, K)
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(1, H, TOKENS, WIDTH, generator=draw)
    k, v = (torch.randn(1, K, TOKENS, WIDTH, generator=draw) for _ in "kv")
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    reads = lesson.read_by(H, K, tiled=order == ORDERS[1])
    shown = F.scaled_dot_product_attention(q, k[:, reads], v[:, reads], is_causal=True)
    sizes = {name: 2 * tokens * L * kv(n, h) for name, n in (("MHA", H), ("this", K), ("MQA", 1))}
    return {
        "reads": reads,
        "error": lesson.relative_error(shown, right),
        "bytes": sizes,
        "wrong": sum(a != b for a, b in zip(reads, lesson.read_by(H, K), strict=True)),
    }


def view_sharing(data, H, K, order):
    tiled = order == ORDERS[1]
    sizes = data["bytes"]
    if data["wrong"]:
        found = f"{data['wrong']} of {H} heads read the wrong keys: error {data['error']:.2f}"
    else:
        found = f"{kind_of(H, K)}: query head h reads key/value head h // {H // K}"
    return [
        [picture(head_graph(H, K, tiled), title=found, height=1.25)],
        [
            Bars([n / GIB for n in sizes.values()], [f"MHA: {H}", f"this: {K}", "MQA: 1"],
                 roles=["k", "cache", "v"], ylabel="GiB", fmt="compact", width=1.2,
                 xlabel="key/value heads", title=f"The cache of one request: "
                 f"{in_bytes(sizes['this'])}"),
            Bars([1, H // K, H], ["MHA", "this", "MQA"], roles=["k", "cache", "v"],
                 ylabel="FLOP a byte", fmt="{:.0f}", title="Work for each byte read (bf16)"),
        ],
    ]  # fmt: skip


def sharing_explorable() -> Explorable:
    """Which key/value head a query head reads, and what sharing saves. Module 09."""
    powers = tuple(2**i for i in range(8))  # a step of one slider then leaves K a divisor of H
    return Explorable(
        "kv_sharing",
        compute_sharing,
        view_sharing,
        lambda data, H, K: f"{H} query heads on {K} key/value heads ({kind_of(H, K)}): "
        f"{in_bytes(data['bytes']['this'])}, as MHA {in_bytes(data['bytes']['MHA'])}; "
        f"{data['wrong']} heads read the wrong keys, output error {data['error']:.2f}",
        controls=dict(
            H=Slider(32, values=powers[2:], label="query heads (H)"),
            K=Slider(8, values=powers, label="key/value heads (K)",
                     help="must divide H"),
            order=Choice(ORDERS[0], ORDERS, label="order"),
            h=Slider(128, 32, 512, log=True, label="width of a head"),
            L=Slider(32, 8, 128, log=True, label="layers"),
            tokens=Slider(8192, values=tuple(2**i for i in range(10, 21)), label="tokens"),
        ),
        title="Turn the dial from MHA to MQA",
        alt=lambda data, H, K: f"{H} query heads read {K} key/value heads; the cache takes "
        f"{in_bytes(data['bytes']['this'])} instead of {in_bytes(data['bytes']['MHA'])}, and "
        f"{data['wrong']} heads read the wrong one.",
        code=lambda H, K, h: f"Config(n_heads={H}, n_kv_heads={K}, d_head={h})",
        invariants=lambda data, H, K, order, h, L, tokens: [
            ("the dial scales the bytes", data["bytes"]["this"] * H == data["bytes"]["MHA"] * K),
            ("as the library counts",
             data["bytes"]["this"] == cache_bytes(
                 Config(n_heads=H, n_kv_heads=K, d_head=h, n_layers=L, n_experts=0,
                        first_k_dense=0), tokens)),
            ("every key/value head is read", sorted(set(data["reads"])) == list(range(K))),
            ("an error exactly where heads differ", (data["error"] > 1e-3) == (data["wrong"] > 0)),
        ],
    )  # fmt: skip


# --- the calculator ---------------------------------------------------------------------------

MENU = tuple(sorted((m.name for m in cached() if m.total), key=str.lower))


def compute_calculator(model, tokens, batch, bits, weight_bits, variant, windows) -> dict:
    row = published(model)
    known = [v for v in lesson.VARIANTS if v == "as published" or can_be(row)]
    one = {v: lesson.bytes_of(row, v, tokens, bits, windows) for v in known}
    require(
        variant in one,
        f"attention={variant!r}: the layers of {model} have heads of several widths.",
        "Choose 'as published'.",
    )
    cache = one[variant]
    most = [lesson.most_requests(row, d, cache, weight_bits) for d in lesson.DEVICES]
    speed = [
        lesson.step_bound(row, d, batch * cache, batch, weight_bits) if fits(n, batch) else None
        for d, n in zip(lesson.DEVICES, most, strict=True)
    ]
    return {"one": one, "cache": cache, "most": most, "speed": speed, "weights": row.total}


def fits(most: int | None, batch: int) -> bool:
    """Whether `batch` requests, and the weights before them, fit on a device for `most`."""
    return most is not None and most >= batch


def can_be(row) -> bool:
    return bool(lesson.head_width(row) and row.n_heads)


def view_calculator(data, model, tokens, batch, variant):
    one = data["one"]
    cards = dict(labels=[f"{d.name}" for d in lesson.DEVICES], fmt="compact",
                 missing="does not fit")  # fmt: skip
    memory = ", ".join(f"{d.memory / 1e9:.0f}" for d in lesson.DEVICES)
    return [
        [
            Bars([n / GIB for n in one.values()], list(one), ylabel="GiB a request", fmt="compact",
                 roles=["cache" if v == variant else "stream" for v in one],
                 title=f"{model}: {in_bytes(data['cache'])} for {tokens:,} tokens"),
        ],
        [
            Bars(known(data["most"]), role="cache", ylabel="requests", **cards,
                 title=f"Most requests beside the weights ({memory} GB)"),
            Bars(known(data["speed"]), role="q", ylabel="tokens/s", **cards,
                 title=f"Bound of memory for {batch} together"),
        ],
    ]  # fmt: skip


def known(values) -> list[float]:
    return [math.nan if value is None else value for value in values]


def said(n: int | None) -> str:
    return "does not fit" if n is None else f"{n:,.0f}"


def fit_in_words(most: int | None) -> str:
    if most is None:
        return "its weights alone do not fit on one device of 141 GB."
    return f"{most:,} such requests fit beside its weights on 141 GB."


def summary_calculator(data, model, tokens, batch, bits, variant):
    return (
        f"{model}, {variant}, {tokens:,} tokens at {bits} bits: {in_bytes(data['cache'])} a "
        f"request, {in_bytes(batch * data['cache'])} for {batch}; most requests on 24/80/141 GB: "
        f"{', '.join(map(said, data['most']))}; tokens/s for {batch} together at most: "
        f"{', '.join(map(said, data['speed']))}"
    )


def calculator_invariants(data, model, tokens, batch, bits, variant, windows):
    one, row = data["one"], published(model)
    all_of_it = lesson.bytes_of(row, variant, tokens, bits, windows=False)
    return [
        ("windows never add", data["cache"] <= all_of_it),
        ("shown is what is counted", data["cache"] == one[variant]),
        ("MQA never exceeds MHA", one.get("MQA", 0) <= one.get("MHA", math.inf)),
        ("a larger device holds no less", [n or 0 for n in data["most"]]
         == sorted(n or 0 for n in data["most"])),
        ("a bound exactly where all of it fits", [n is not None for n in data["speed"]]
         == [n is not None and n >= batch for n in data["most"]]),
        ("faster memory is faster", data["speed"]
         == sorted(data["speed"], key=lambda n: -1 if n is None else n)),
    ]  # fmt: skip


def calculator_explorable() -> Explorable:
    """Cache, requests and speed bound of published models, and of what they might have been.
    Module 09."""
    return Explorable(
        "kv_calculator",
        compute_calculator,
        view_calculator,
        summary_calculator,
        controls=dict(
            model=Choice("Llama-3-8B", MENU, label="model"),
            variant=Choice("as published", lesson.VARIANTS, label="attention"),
            tokens=Slider(32768, values=tuple(2**i for i in range(10, 21)),
                          label="tokens of a request"),
            batch=Slider(8, 1, 256, log=True, label="requests together"),
            bits=Choice(16, (16, 8, 4), label="bits of a cached value"),
            weight_bits=Choice(16, (16, 8, 4), label="bits of a weight"),
            windows=Toggle(True, label="windowed layers forget",
                           help="off: every layer keeps every token"),
        ),
        title="How large, how many, how fast at most?",
        alt=lambda data, model, tokens: f"{model} needs {in_bytes(data['cache'])} of cache for "
        f"{tokens:,} tokens; " + fit_in_words(data["most"][-1]),
        code=lambda model, tokens, bits, windows: f"published_cache_bytes(published('{model}'), "
        f"{tokens}, bits={bits}, windows={windows})",
        invariants=calculator_invariants,
        height=372,
    )  # fmt: skip


# --- the cell of MLA --------------------------------------------------------------------------

D = 7168  # width of the stream, as in DeepSeek-V3
FORMS = ("absorbed", "naive")


def cell_config(H, r, p, n, form) -> Config:
    part = MLA(kv_lora_rank=r, d_rope=p, d_nope=n, d_value=n, form=form)
    return Config(d_model=D, n_heads=H, n_kv_heads=H, attention=part, n_experts=0, first_k_dense=0)


def cell_shapes(H, r, p, n, P, T, form) -> dict[str, tuple]:
    """Every tensor of the cell, computed on torch's meta device: shapes without memory."""
    attn, S = meta_attention(cell_config(H, r, p, n, form)), P + T
    with torch.device("meta"):
        x = torch.empty(1, T, D)
        q = split_heads(attn.W_q(x), H)
        q_nope, q_rope = q.split((n, p), dim=-1)
        latent, k_rope = torch.empty(1, S, r), torch.empty(1, S, p)
        new = attn.W_dkv(x)
        U_k, U_v = (W.weight.unflatten(0, (H, n)) for W in (attn.W_uk, attn.W_uv))
        shapes = {"x": x, "q": q, "q_rope": q_rope, "new": new, "latent": latent,
                  "k_rope": k_rope}  # fmt: skip
        if form == "absorbed":
            inside = q_nope @ U_k
            scores = inside @ latent[:, None].mT + q_rope @ k_rope[:, None].mT
            summed = scores @ latent[:, None]
            heads = summed @ U_v.mT
            shapes |= {"q_latent": inside, "summed": summed}
        else:
            k, v = split_heads(attn.W_uk(latent), H), split_heads(attn.W_uv(latent), H)
            scores = q_nope @ k.mT + q_rope @ k_rope[:, None].mT
            heads = scores @ v
            shapes |= {"k": k, "v": v}
        shapes |= {"scores": scores, "heads": heads}
        shapes["out"] = attn.W_o(heads.transpose(1, 2).flatten(2))
    return {name: tuple(t.shape) for name, t in shapes.items()}


def cell_flops(H, r, p, n, P, T, form) -> tuple[int, int]:
    """FLOP of the attention itself, and of going in and out of the latent."""
    S = P + T
    if form == "absorbed":
        return 2 * T * S * H * (2 * r + p), 2 * T * H * 2 * r * n
    return 2 * T * S * H * (2 * n + p), 2 * S * H * 2 * r * n


def compute_cell(H, r, p, n, P, T, form) -> dict:
    sizes = (H, r, p, n, P, T)
    values = cache_values(cell_config(H, r, p, n, form))
    return {
        "shapes": cell_shapes(*sizes, form),
        "flops": {f: cell_flops(*sizes, f) for f in FORMS},
        "cache": 2 * (P + T) * values,
        "expanded": 2 * (P + T) * H * (2 * n + p),
        "values": values,
    }


def cell_boxes(shapes, form):
    at = {
        "x": (0, 2, "x"), "q": (1, 0, "W_q x"), "new": (1, 3, "W_dkv x"),
        "q_rope": (2, 1, "RoPE: q_rope"), "k_rope": (2, 2, "cache: k_rope"),
        "latent": (2, 4, "cache: latent c"), "scores": (4, 1, "scores, softmax"),
    }  # fmt: skip
    edges = [("x", "q", "q"), ("x", "new", "k"), ("q", "q_rope", "q"), ("new", "k_rope", "k"),
             ("new", "latent", "cache"), ("q_rope", "scores", "q"),
             ("k_rope", "scores", "k")]  # fmt: skip
    if form == "absorbed":
        at |= {"q_latent": (3, 0, "q_nope U_k"), "summed": (4, 4, "sum of latents"),
               "heads": (5, 4, "U_v, per head"), "out": (5, 2, "W_o")}  # fmt: skip
        edges += [("q", "q_latent", "q"), ("q_latent", "scores", "q"),
                  ("latent", "scores", "cache"), ("latent", "summed", "cache"),
                  ("scores", "summed", "scores"), ("summed", "heads", "v"),
                  ("heads", "out", "stream")]  # fmt: skip
    else:
        at |= {"k": (3, 3, "keys: U_k c"), "v": (3, 4, "values: U_v c"),
               "heads": (4, 4, "sum of values"), "out": (5, 2, "W_o")}  # fmt: skip
        edges += [("q", "scores", "q"), ("latent", "k", "cache"), ("latent", "v", "cache"),
                  ("k", "scores", "k"), ("v", "heads", "v"), ("scores", "heads", "scores"),
                  ("heads", "out", "stream")]  # fmt: skip
    roles = {"x": "stream", "out": "stream", "new": "cache", "k_rope": "cache", "latent": "cache",
             "scores": "scores", "k": "k", "v": "v", "summed": "v", "heads": "v"}  # fmt: skip
    boxes = [(name, column, row, (words, str(shapes[name])), roles.get(name, "q"))
             for name, (column, row, words) in at.items()]  # fmt: skip
    return boxes, edges


def in_gflop(data, form: str) -> str:
    n = sum(data["flops"][form]) / 1e9
    return f"{n:,.0f}" if n >= 1000 else f"{n:.3g}"


def view_cell(data, T, form):
    flops = np.array([data["flops"][f] for f in FORMS]).T / 1e9
    total = {f: sum(data["flops"][f]) for f in FORMS}
    better = min(total, key=total.get)
    ratio = max(total.values()) / min(total.values())
    return [
        [picture(cell_sketch(*cell_boxes(data["shapes"], form),
                             "each box with the shape that leaves it"), height=1.35)],
        [
            Bars(flops, list(FORMS), names=["attention", "into and out of the latent"],
                 roles=["scores", "norm"], ylabel="GFLOP", fmt="compact", width=1.2,
                 title=f"{T} new token{'s' * (T > 1)}: {better} needs {ratio:.3g} times less"),
            Bars([data["cache"] / 2**20, data["expanded"] / 2**20], ["latent", "expanded heads"],
                 roles=["cache", "k"], ylabel="MiB a layer", fmt="compact",
                 title=f"{data['values']} values a token are cached"),
        ],
    ]  # fmt: skip


def cell_explorable() -> Explorable:
    """One MLA layer with the shape of every tensor, naive and absorbed. Module 09."""
    return Explorable(
        "mla_cell",
        compute_cell,
        view_cell,
        lambda data, form: f"{form}: scores {data['shapes']['scores']}; cache "
        f"{in_bytes(data['cache'])} a layer, expanded {in_bytes(data['expanded'])}; absorbed "
        f"{in_gflop(data, 'absorbed')} GFLOP, naive {in_gflop(data, 'naive')} GFLOP",
        controls=dict(
            form=Choice("absorbed", FORMS),
            H=Slider(128, 4, 128, log=True, label="heads (H)"),
            r=Slider(512, 64, 1024, log=True, label="latent (r)"),
            p=Slider(64, 16, 128, step=16, label="rotated key (p)"),
            n=Slider(128, 32, 256, step=32, label="unrotated and value width"),
            P=Slider(4095, 0, 32767, step=65, label="cached tokens"),
            T=Slider(1, 1, 1024, log=True, label="new tokens (T)",
                     help="1 is decoding, many are a prefill"),
        ),
        title="Inside MLA: one latent for all heads",
        alt=lambda data, T: f"With {T} new token{'s' * (T > 1)} the absorbed form needs "
        f"{in_gflop(data, 'absorbed')} GFLOP and the naive one {in_gflop(data, 'naive')}; both "
        f"cache {in_bytes(data['cache'])}.",
        code=lambda r, p, n, form: f"MLA(kv_lora_rank={r}, d_rope={p}, d_nope={n}, d_value={n}, "
        f"form='{form}')",
        invariants=lambda data, H, r, p, n, P, T: [
            ("r + p values", data["values"] == r + p),
            ("scores for every head", data["shapes"]["scores"] == (1, H, T, P + T)),
            ("heads of the value width", data["shapes"]["heads"] == (1, H, T, n)),
            ("out is the stream", data["shapes"]["out"] == (1, T, D)),
        ],
        height=372,
    )  # fmt: skip


# --- intensity against the ridge --------------------------------------------------------------

DEVICE_NAMES = tuple(device.name for device in lesson.DEVICES)


def device_named(name: str) -> lesson.Device:
    return lesson.DEVICES[DEVICE_NAMES.index(name)]


def compute_intensity(H, K, r, bits, queries) -> dict:
    lesson.group_of(H, K)
    base = dict(n_heads=H, d_head=128, n_experts=0, first_k_dense=0)
    kinds = {
        "MHA": Config(n_kv_heads=H, **base),
        f"GQA {K}": Config(n_kv_heads=K, **base),
        "MQA": Config(n_kv_heads=1, **base),
        "MLA": Config(n_kv_heads=H, attention=MLA(r, 64, 128, 128), **base),
    }
    return {name: lesson.intensity(cfg, bits / 8, queries) for name, cfg in kinds.items()}


def view_intensity(data, device, queries):
    card = device_named(device)
    x = np.geomspace(0.5, 16384, 60)
    roof = lesson.attainable(card, torch.from_numpy(x)).numpy() / 1e12
    best = max(data, key=data.get)
    return [
        Lines(x, {"at most": roof}, xlog=True, ylog=True, roles=["stream"], width=1.1,
              xlabel="FLOP a byte of cache", ylabel="TFLOP/s",
              marks={name: data[name] for name in ("MHA", "MLA")},
              title=f"{device}: ridge at {card.ridge:.0f} FLOP a byte"),
        Bars(list(data.values()), list(data), roles=["k", "cache", "v", "scores"], fmt="compact",
             ylabel="FLOP a byte", reference=card.ridge, reference_label="ridge",
             title=f"{best}: {data[best] / card.ridge:.2g} times the ridge"),
    ]  # fmt: skip


def intensity_explorable() -> Explorable:
    """How much arithmetic each cached byte feeds, against what a device can do. Module 09."""
    heads = (8, 16, 32, 64, 96, 128)
    return Explorable(
        "kv_intensity",
        compute_intensity,
        view_intensity,
        lambda data, device: "FLOP a byte: "
        + ", ".join(f"{name} {value:.4g}" for name, value in data.items())
        + f"; ridge of {device} {device_named(device).ridge:.0f}",
        controls=dict(
            H=Slider(128, values=heads, label="query heads (H)"),
            K=Slider(8, values=(1, 2, 4, *heads), label="key/value heads of GQA"),
            r=Slider(512, 64, 1024, log=True, label="latent of MLA (r)"),
            bits=Choice(16, (16, 8, 4), label="bits of a cached value"),
            queries=Slider(1, 1, 8, label="tokens checked a step",
                           help="more than one with speculative decoding"),
            device=Choice("H200", DEVICE_NAMES),
        ),
        view_only=("device",),
        title="Who is limited by memory?",
        alt=lambda data, device: f"Against a ridge of {device_named(device).ridge:.0f} FLOP a "
        f"byte on {device}, MHA does {data['MHA']:.3g} and MLA {data['MLA']:.3g}.",
        code=lambda H, r: f"intensity(Config(n_heads={H}, attention=MLA({r}, 64, 128, 128)))",
        invariants=lambda data, H, K, bits, queries, r: [
            ("MHA does one FLOP for each 16 bits and query",
             math.isclose(data["MHA"], queries * 16 / bits)),
            ("GQA does a group of them", math.isclose(data[f"GQA {K}"], data["MHA"] * H / K)),
            ("MLA", math.isclose(data["MLA"], data["MHA"] * H * (2 * r + 64) / (r + 64))),
        ],
        height=330,
    )  # fmt: skip


# --- SmolLM2's heads --------------------------------------------------------------------------

MOST_TOKENS, LAYERS = 20, 30
POOLS = ("3, as trained", "1: their mean", "1: the first of 3", "3, tiled (wrong)")


@lru_cache(1)
def smollm2_by_row() -> ModernDecoder:
    """SmolLM2 with a way of sharing for each row of a batch, in the order of POOLS."""
    return lesson.with_pools_by_row(smollm2()[0])


def compute_smollm2(text: str) -> dict:
    """All ways of sharing at once: to choose another one then only shows what is there."""
    _, tokenizer = smollm2()
    ids = tokens_of(text, MOST_TOKENS)
    require(len(ids) > 1, "One token has no next one to predict.", "Write at least two words.")
    batch = torch.tensor([ids] * len(POOLS))
    run = trace(smollm2_by_row(), batch, flops=False)
    layers = [run[f"blocks.{i}.attn.weights"].value for i in range(LAYERS)]
    logits = run["lm_head"].value
    return {
        "maps": {pool: torch.stack([x[n] for x in layers]) for n, pool in enumerate(POOLS)},
        "loss": {
            pool: next_token_loss(logits[[n]], batch[[n]]).item() for n, pool in enumerate(POOLS)
        },
        "tokens": [visible(token) for token in tokenizer.tokens(ids)],
    }


def reads_of(pool: str) -> list[int]:
    return lesson.read_by(9, 1 if pool in POOLS[1:3] else 3, tiled=pool == POOLS[3])


def view_smollm2(data, layer, pool):
    T = len(data["tokens"])
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    names = [f"{h} reads {k}" for h, k in enumerate(reads_of(pool))]
    loss, chance = data["loss"][pool], math.log(smollm2()[0].cfg.vocab_size)
    ticks = data["tokens"] if T <= 6 else None
    return [
        Heat(data["maps"][pool][layer], names=names, hidden=future, hidden_label="the future",
             limits=(0, 1), square=True, width=2.4, xlabel="key", ylabel="query",
             xticks=ticks, yticks=ticks,
             title=f"Layer {layer}: which query head reads which key/value head ({pool})"),
        Bars([data["loss"][POOLS[0]], loss, chance], ["trained", "shown", "chance"],
             roles=["cache", "k", "stream"], fmt="{:.2f}", ylabel="nats a token",
             title=f"Loss {loss:.2f}"),
    ]  # fmt: skip


def summary_smollm2(data, layer, pool) -> str:
    return (
        f"layer {layer}, {pool}: loss {data['loss'][pool]:.2f}, as trained "
        f"{data['loss'][POOLS[0]]:.2f} nats a token over {len(data['tokens']) - 1} predictions"
    )


def smollm2_invariants(data, pool):
    maps, averaged = data["maps"][pool], data["maps"][POOLS[1]]  # (L, H, T, T)
    sums = maps.sum(-1)
    return [
        ("weights sum to 1", bool(torch.allclose(sums, torch.ones_like(sums), atol=1e-3))),
        ("no weight on the future", float(maps.triu(1).max()) == 0),
        ("nine heads in each layer", maps.shape[:2] == (LAYERS, 9)),
        ("every way of sharing attends differently", pool == POOLS[1] or
         not torch.allclose(maps, averaged, atol=1e-2)),
    ]  # fmt: skip


def smollm2_explorable() -> Explorable:
    """SmolLM2's nine query heads on three, or fewer, key/value heads. Module 09."""
    return Explorable(
        "smollm2_heads",
        compute_smollm2,
        view_smollm2,
        summary_smollm2,
        controls=dict(
            text=Text("Rain falls on the hills and runs into the sea.", label="text"),
            pool=Choice(POOLS[0], POOLS, label="key/value heads"),
            layer=Slider(4, 0, LAYERS - 1),
        ),
        view_only=("layer", "pool"),
        title="What SmolLM2's heads lose when they share more",
        alt=lambda data, pool: f"With key/value heads {pool!r} the loss is "
        f"{data['loss'][pool]:.2f} nats a token; as trained it is {data['loss'][POOLS[0]]:.2f}.",
        code=lambda pool: "with_pooled_heads(model, 1, 'first')" if pool == POOLS[2]
        else "with_mistakes(model, TiledHeads)" if pool == POOLS[3]
        else f"with_pooled_heads(model, {3 if pool == POOLS[0] else 1}, 'mean')",
        invariants=smollm2_invariants,
        runs="smollm2",
        height=360,
    )  # fmt: skip
