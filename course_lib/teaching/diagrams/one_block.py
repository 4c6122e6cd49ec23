"""One block: attention and feed-forward each read the stream, and add to it."""

from collections.abc import Callable

from course_lib.model import (
    GroupedQueryAttention,
    ModernDecoder,
    MultiHeadLatentAttention,
    Rope,
)
from course_lib.trace import Trace

from .diagram import Diagram
from .grid import Grid
from .reading import Reading, check_layer, check_trace, plural
from .shapes import Label, Node
from .telling import About, line_of
from .whole import ffn_lines, ffn_role, part, rope_node, table_label

# Columns from left to right, rows from top to bottom.
STREAM, NORM, PROJECT, TURN, CACHE, SHARE, CORE = range(7)
Q, TABLE, K, V, BACK, FFN, END = range(7)


def block(model: ModernDecoder, trace: Trace, layer: int = 0) -> Diagram:
    """Draw one block of the model that made `trace`: x (B, T, D) in and out, attention opened.

    Grouped-query and latent attention, RoPE or ALiBi, window, sinks, dense or MoE: as built.
    Raises ValueError for a layer that is not there. Module 16."""
    check_trace(model, trace)
    layer = check_layer(model, layer)
    reading, grid = Reading(model, trace, f"blocks.{layer}."), Grid()
    stream = stream_through(grid, reading, layer)
    attn = model.blocks[layer].attn
    draw = INSIDE[type(attn)]
    inside = draw(grid, reading, attn, stream["norm1"], layer)
    attention_back(grid, reading, attn, inside, stream["add1"])
    feed_forward(grid, reading, model.blocks[layer], stream)
    shapes = ", ".join(
        f"{name} {reading.stage(f'attn.{stage}').shape}" for name, stage in SUMMARY[type(attn)]
    )
    return Diagram(grid.arrange(), "block", f"block {layer}", shapes, trace)


SUMMARY = {
    GroupedQueryAttention: (("Q", "q_rotated"), ("K", "k_rotated"), ("scores", "scores")),
    MultiHeadLatentAttention: (("Q", "q"), ("latent", "latent"), ("scores", "scores")),
}


def stream_through(grid: Grid, reading: Reading, layer: int) -> dict[str, Node]:
    """The thick line on the left: x in, two reads, two adds, x out."""
    came = "embed" if layer == 0 else f"blocks.{layer - 1}.after_ffn"
    stages = {"x": came, "y": f"{reading.prefix}after_ffn"}
    words = stream_words(layer, len(reading.model.blocks))
    ends = {
        name: Node(name, ("x", words[name]), kind="bare", about=About("stream", (stages[name],)))
        for name in ("x", "y")
    }
    nodes = {
        "x": ends["x"],
        "read1": Node("read1", ("",), kind="dot"),
        "add1": add_node(reading, "after_attn", "attention"),
        "read2": Node("read2", ("",), kind="dot"),
        "add2": add_node(reading, "after_ffn", "feed-forward"),
        "y": ends["y"],
    }
    rows = (Q - 1, K, BACK, FFN, END, END + 1)
    for node, row in zip(nodes.values(), rows, strict=True):
        grid.put(STREAM, row, node)
    carried = {"read1": came, "read2": f"{reading.prefix}after_attn", "y": stages["y"]}
    for above, below in zip([*nodes.values()], [*nodes.values()][1:], strict=False):
        labels = [reading.of(carried[below.name])] if below.name in carried else []
        grid.join(above, below, *labels, route="v", thick=True, place="left")
    grid.room_below(END, 36)
    return nodes | norms(grid, reading, nodes, carried)


def stream_words(layer: int, n_layers: int) -> dict[str, str]:
    """Where x comes from and where it goes."""
    last = layer == n_layers - 1
    return {
        "x": "from the embedding" if layer == 0 else f"from block {layer - 1}",
        "y": "to the final norm" if last else f"to block {layer + 1}",
    }


def norms(grid: Grid, reading: Reading, nodes: dict, carried: dict) -> dict[str, Node]:
    """The two RMSNorms, each fed by a copy of the stream."""
    block_, made = reading.model.blocks[int(reading.prefix.split(".")[1])], {}
    for number, row in ((1, K), (2, FFN)):
        name = f"norm{number}"
        about = part("norm", f"{reading.prefix}{name}", getattr(block_, name))
        made[name] = Node(name, ("RMSNorm",), "norm", about=about)
        grid.put(NORM, row, made[name])
        read = f"read{number}"
        grid.join(nodes[read], made[name], reading.of(carried[read]))
    return made


def add_node(reading: Reading, stage: str, what: str) -> Node:
    about = About("stream", (reading.prefix + stage,))
    return Node(stage, ("+", f"residual add of {what}"), kind="add", about=about)


def step(reading: Reading, name: str, lines: tuple, role: str, key: str, *stages, **more) -> Node:
    about = About(key, tuple(f"{reading.prefix}attn.{stage}" for stage in stages), **more)
    return Node(name, lines, role, about=about)


# -- grouped-query attention ------------------------------------------------------------------


def grouped_query(grid: Grid, reading: Reading, attn, norm: Node, layer: int) -> dict[str, Node]:
    """Lanes for Q, K and V up to the core; returns the nodes that the way back needs."""
    projections = projected(grid, reading, attn, norm)
    turned = {role: turn(grid, reading, attn, role, layer, projections[role]) for role in "qk"}
    rope_feeds(grid, reading, layer, [turned["q"], turned["k"]])
    cache = cache_node(grid, reading, attn)
    grid.join(turned["k"][-1], cache, reading.label("attn.k_rotated"), role="k")
    grid.join(projections["v"], cache, reading.label("attn.v"), role="v")
    core = core_nodes(grid, reading, attn)
    query = reading.label("attn.q_rotated")
    grid.join(turned["q"][-1], core["scores"], query, role="q", route="hvh", arrive=-9)
    expanded = share_heads(grid, reading, attn, cache, core)
    inside = [*projections.values(), *turned["q"], *turned["k"], cache, *core.values(), *expanded]
    return {"core": core["sum"], "inside": inside}


def projected(grid: Grid, reading: Reading, attn, norm: Node) -> dict[str, Node]:
    nodes = {}
    for role, row, heads in (("q", Q, attn.H), ("k", K, attn.H_kv), ("v", V, attn.H_kv)):
        weight = getattr(attn, f"W_{role}")
        lines = (f"W_{role}", plural(heads, "head"))
        nodes[role] = step(reading, f"W_{role}", lines, role, "project", role, weights=weight)
        grid.put(PROJECT, row, nodes[role])
    grid.join(norm, list(nodes.values()), reading.label("norm1"), route="hvh")
    return nodes


def turn(grid: Grid, reading: Reading, attn, role: str, layer: int, source: Node) -> list[Node]:
    """QK-Norm and RoPE of one lane, as far as this layer has them; else the projection itself."""
    nodes, line = [], line_of(type(attn), f"{role} = self.see_{role}_rotated(")
    if reading.cfg.attention.qk_norm:
        norm = getattr(attn, f"{role}_norm")
        lines = ("QK-Norm", "each head")
        more = dict(source=line, weights=norm)
        nodes.append(step(reading, f"{role}_norm", lines, "norm", "norm", **more))
    if reading.cfg.position.rotates(layer):
        lines = ("RoPE", rotated_share(reading))
        stage = f"{role}_rotated"
        nodes.append(step(reading, f"{role}_rope", lines, role, "rope", stage))
    if not nodes:
        return [source]
    row = Q if role == "q" else K
    grid.put(TURN, row, *nodes)
    grid.join(source, nodes[0], reading.label(f"attn.{role}"), role=role)
    return nodes


def rotated_share(reading: Reading) -> str:
    width, turned = reading.stage("attn.q").shape[-1], reading.cfg.d_rotated
    return "all channels" if width == turned else f"{turned} of {width} channels"


def rope_feeds(grid: Grid, reading: Reading, layer: int, lanes: list[list[Node]]):
    """The table between the lanes, dashed into both rotations."""
    if not reading.cfg.position.rotates(layer):
        return
    table = rope_node(reading)
    grid.put(TURN, TABLE, table)
    for nodes in lanes:
        rope = nodes[-1]
        offset = sum(n.width() for n in nodes) / 2 - rope.width() / 2
        how = dict(route="v", dashed=True, place="right", leave=offset)
        grid.join(table, rope, table_label(reading), **how)


def cache_node(grid: Grid, reading: Reading, attn) -> Node:
    kept = f"{reading.bytes_a_token(attn):,} bytes"
    owner = "latent, k_rope = cache.update(" if "latent" in attn.cache_spec() else "cache.update("
    source = line_of(type(attn), owner)
    node = step(reading, "cache", ("cache", kept, "a token"), "cache", "cache", source=source)
    grid.put(CACHE, K, node, rows=2, tall=True)
    return node


def share_heads(grid: Grid, reading: Reading, attn, cache: Node, core: dict) -> list[Node]:
    """From the cache to the core: each key/value head is given to its group of query heads."""
    made = []
    for role, row, target in (("k", K, "scores"), ("v", V, "sum")):
        stage = "k_rotated" if role == "k" else "v"
        held = reading.like(f"attn.{stage}", T_S=reading.keys)
        full = reading.label(f"attn.{role}_expanded")
        if attn.group_size > 1:
            lines = (f"repeat × {attn.group_size}", "not cached")
            shared = step(reading, f"{role}_expand", lines, role, "expand", f"{role}_expanded")
        else:
            shared = Node(f"{role}_expand", ("",), role, kind="dot")
        grid.put(SHARE, row, shared)
        grid.join(cache, shared, held, role=role)
        into_core(grid, shared, core[target], full, role)
        made.append(shared)
    return made


def into_core(grid: Grid, source: Node, target: Node, label: Label, role: str):
    """Keys climb to the scores, values go straight to the weighted sum."""
    how = dict(route="hvh", arrive=9) if role == "k" else {}
    grid.join(source, target, label, role=role, **how)


# -- latent attention ---------------------------------------------------------------------------


def latent_attention(grid: Grid, reading: Reading, attn, norm: Node, layer: int) -> dict:
    """Lanes for Q, the rotated key and the latent; only the last two are cached."""
    W_q = step(
        reading, "W_q", ("W_q", plural(attn.H, "head")), "q", "project", "q", weights=attn.W_q
    )
    W_dkv = step(
        reading,
        "W_dkv",
        ("W_dkv", "one for all heads"),
        "cache",
        "latent",
        weights=attn.W_dkv,
        source=line_of(type(attn), "self.W_dkv(x)"),
    )
    grid.put(PROJECT, Q, W_q)
    grid.put(PROJECT, K, W_dkv, rows=2, tall=True)
    grid.join(norm, [W_q, W_dkv], reading.label("norm1"), route="hvh")
    queries = latent_queries(grid, reading, attn, W_q)
    k_rope = step(reading, "k_rope", ("RoPE", "one key head"), "k", "rope", "k_rope")
    kv_norm = step(reading, "kv_norm", ("RMSNorm",), "norm", "norm", "latent", weights=attn.kv_norm)
    cache = cache_node(grid, reading, attn)
    for node, row, name, role in ((k_rope, K, "k_rope", "k"), (kv_norm, V, "latent", "cache")):
        grid.put(TURN, row, node)
        # neither step changes a shape, so what goes in is as large as what comes out
        grid.join(W_dkv, node, reading.like(f"attn.{name}"), role=role)
        grid.join(node, cache, reading.label(f"attn.{name}"), role=role)
    rope_feeds(grid, reading, layer, [queries[:1], [k_rope]])
    core = core_nodes(grid, reading, attn)
    unfolded = unfold(grid, reading, attn, cache, core)
    met = query_met(reading)
    grid.join(queries[-1], core["scores"], met, role="q", route="hvh", arrive=-9)
    inside = [W_q, W_dkv, *queries, k_rope, kv_norm, cache, *core.values(), *unfolded]
    return {"core": core["sum"], "inside": inside}


def latent_queries(grid: Grid, reading: Reading, attn, W_q: Node) -> list[Node]:
    source = line_of(type(attn), "q_rope = self.rotate(")
    nodes = [step(reading, "q_rope", ("RoPE", rotated_share(reading)), "q", "rope", source=source)]
    if attn.form == "absorbed":
        about = dict(source=line_of(type(attn), "q_nope @ U_k"), weights=attn.W_uk)
        nodes.append(step(reading, "absorb", ("W_uk", "absorbed"), "q", "absorb", **about))
    grid.put(TURN, Q, *nodes)
    grid.join(W_q, nodes[0], reading.label("attn.q"), role="q")
    return nodes


def query_met(reading: Reading) -> Label:
    """The queries that met the keys: a score is a dot product, so both are equally wide."""
    width = reading.stage("attn.k_expanded").shape[-1]
    return Label((*reading.stage("attn.scores").shape[:3], width), "B H T h")


def unfold(grid: Grid, reading: Reading, attn, cache: Node, core: dict) -> list[Node]:
    """From the cache to keys and values: multiplied out of the latent, or the latent itself."""
    naive, made = attn.form == "naive", []
    held = reading.cached(attn, read=True)
    for role, row, target, weight in (("k", K, "scores", "W_uk"), ("v", V, "sum", "W_uv")):
        title = (weight, "beside k_rope" if role == "k" else "every head")
        if not naive:
            title = (f"share × {attn.H}", "latent, k_rope" if role == "k" else "latent")
        about = dict(weights=getattr(attn, weight)) if naive else {}
        key = "unfold" if naive else "absorb"
        node = step(reading, f"{role}_expand", title, role, key, f"{role}_expanded", **about)
        grid.put(SHARE, row, node)
        reads = held if role == "k" else held[:1]
        grid.join(cache, node, *[Label(x.shape, "", x.word) for x in reads], role=role)
        into_core(grid, node, core[target], reading.label(f"attn.{role}_expanded"), role)
        made.append(node)
    return made


# -- the core, the same for all variants --------------------------------------------------------


def core_nodes(grid: Grid, reading: Reading, attn) -> dict[str, Node]:
    softmax = ("softmax", *visible(reading))
    nodes = {
        "scores": step(
            reading,
            "scores",
            ("scores", f"Q Kᵀ × {attn.core.scale:.4g}"),
            "scores",
            "scores",
            "scores",
        ),
        "softmax": step(reading, "softmax", softmax, "scores", "scores", "weights"),
        "sum": step(reading, "sum", weighted_sum(attn), "v", "scores", "heads"),
    }
    for node, row in zip(nodes.values(), (TABLE, K, V), strict=True):
        grid.put(CORE, row, node)
    down = dict(role="scores", route="v", place="right")
    grid.join(nodes["scores"], nodes["softmax"], reading.label("attn.scores"), **down)
    grid.join(nodes["softmax"], nodes["sum"], reading.label("attn.weights"), **down)
    return nodes


def weighted_sum(attn) -> tuple[str, str]:
    if getattr(attn, "form", "") == "absorbed":
        return "weights × latent", "then W_uv"
    return "weights × V", "in each head"


def visible(reading: Reading) -> list[str]:
    """What a query may see, and what is added to its scores, in words."""
    part_ = reading.cfg.attention
    window = getattr(part_, "window", None)
    lines = [f"causal, window {window}" if window else "causal mask"]
    if not isinstance(reading.cfg.position, Rope):
        lines.append("+ ALiBi slopes")
    if getattr(part_, "sinks", False):
        lines.append("+ a sink a head")
    return lines


def attention_back(grid: Grid, reading: Reading, attn, inside: dict, add: Node):
    """Concatenate the heads, W_o, and add to the stream."""
    concat = step(reading, "concat", ("concat", "heads side by side"), "stream", "concat", "concat")
    about = About("output", (f"{reading.prefix}attn",), weights=attn.W_o)
    output = Node("W_o", ("W_o", "mixes the heads"), "stream", about=about)
    grid.put(SHARE, BACK, concat)
    grid.put(TURN, BACK, output)
    label = reading.label("attn.heads")
    grid.join(inside["core"], concat, label, route="vh", holder="last")
    grid.join(concat, output, reading.label("attn.concat"))
    grid.join(output, add, reading.label("attn"), holder="last")
    title = f"{type(attn).__name__}: {heads_in_words(reading, attn)}"
    grid.frame(title, [*inside["inside"], concat, output], "scores", left=30)


def heads_in_words(reading: Reading, attn) -> str:
    cfg = reading.cfg
    if isinstance(attn, MultiHeadLatentAttention):
        return f"{plural(cfg.n_heads, 'query head')}, one latent of {attn.r} ({attn.form})"
    return f"{plural(cfg.n_heads, 'query head')}, {plural(cfg.n_kv_heads, 'key/value head')}"


def feed_forward(grid: Grid, reading: Reading, block_, stream: dict[str, Node]):
    """norm2, the dense layer or the experts, and the second add."""
    key = "moe" if block_.is_moe else "swiglu"
    about = part(key, f"{reading.prefix}ffn", block_.ffn)
    ffn = Node("ffn", ffn_lines(reading, block_), ffn_role(block_), about=about)
    grid.put(PROJECT, FFN, ffn)
    grid.join(stream["norm2"], ffn, reading.label("norm2"))
    label = reading.label("ffn")
    grid.join(ffn, stream["add2"], label, route="vh", holder="last")
    if block_.is_moe:
        about = About("gate", (f"{reading.prefix}ffn.router_logits",), weights=block_.ffn.gate)
        loss = Node("balance", ("router logits", "to the balance loss"), "router", about=about)
        grid.put(TURN, FFN, loss)
        grid.join(ffn, loss, reading.label("ffn.router_logits"), role="router")


INSIDE: dict[type, Callable] = {
    GroupedQueryAttention: grouped_query,
    MultiHeadLatentAttention: latent_attention,
}
