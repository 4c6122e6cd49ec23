"""The whole decoder: ids, embedding, blocks on the residual stream, final norm, tied head."""

import torch

from course_lib.model import ModernDecoder, MultiHeadLatentAttention
from course_lib.trace import Trace

from .diagram import Diagram
from .grid import Grid
from .reading import Reading, check_trace, plural
from .shapes import Label, Node
from .telling import About, line_of

SHOWN = 6  # blocks; of more, the first three and the last two are drawn
HEADS = "{} query heads on {}"


def architecture(model: ModernDecoder, trace: Trace) -> Diagram:
    """Draw the model that made `trace`: ids (B, T) to logits (B, T, V), every shape as recorded.

    Raises ValueError if the trace is of another model. Module 16."""
    check_trace(model, trace)
    reading, grid = Reading(model, trace), Grid()
    stacks = blocks_on_stream(grid, reading)
    embed = way_in(grid, reading)
    stream = [embed, *(middle for middle, _ in stacks)]
    last_row = len(stacks) + 1
    norm_f = Node("norm_f", ("final RMSNorm",), "norm", about=part("norm", "norm_f", model.norm_f))
    grid.put(1, last_row, norm_f)
    join_stream(grid, reading, [*stream, norm_f], [last for _, last in stacks])
    head = way_out(grid, reading, norm_f, last_row)
    tie(grid, reading, embed, head)
    rope_table(grid, reading, stacks)
    logits = trace["lm_head"].shape
    summary = f"ids {trace['ids'].shape}, stream {trace['embed'].shape}, logits {logits}"
    name = f"{plural(len(model.blocks), 'block')} of a decoder"
    return Diagram(grid.arrange(), "architecture", name, summary, trace)


def part(key: str, stage: str, module=None, **more) -> About:
    return About(key, (stage,), weights=module, **more)


def way_in(grid: Grid, reading: Reading) -> Node:
    ids, model = reading.stage("ids").value[0].tolist(), reading.model
    some = " ".join(str(i) for i in ids[:6]) + (" ..." if len(ids) > 6 else "")
    tokens = Node("ids", ("token ids", some), about=part("ids", "ids"))
    shape = tuple(model.embed.weight.shape)
    about = part("embedding", "embed", model.embed)
    embed = Node("embed", ("embedding", f"table {shape}"), "stream", about=about)
    grid.put(0, 0, tokens)
    grid.put(1, 0, embed)
    grid.join(tokens, embed, reading.label("ids"))
    return embed


def way_out(grid: Grid, reading: Reading, norm_f: Node, row: int) -> Node:
    model = reading.model
    shape = tuple(model.lm_head.weight.shape)
    about = part("head", "lm_head", model.lm_head)
    head = Node("lm_head", ("lm_head", f"weight {shape}"), "stream", about=about)
    tokens = Node("logits", ("logits", "one score a word"), about=part("head", "lm_head"))
    grid.put(2, row, head)
    grid.put(3, row, tokens)
    grid.join(norm_f, head, reading.label("norm_f"))
    grid.join(head, tokens, reading.label("lm_head"))
    return head


def tie(grid: Grid, reading: Reading, embed: Node, head: Node):
    """The one weight that reads tokens in and out, if the Config ties it."""
    if reading.cfg.tied:
        weight = Label(tuple(reading.model.lm_head.weight.shape), "V D", "tied, one weight")
        grid.join(embed, head, weight, route="hv", dashed=True, holder="last")


def drawn_layers(n: int) -> tuple[list[int], list[int], list[int]]:
    """Which layers are drawn first, which are named together, which are drawn last."""
    if n <= SHOWN:
        return list(range(n)), [], []
    return list(range(3)), list(range(3, n - 2)), list(range(n - 2, n))


def blocks_on_stream(grid: Grid, reading: Reading) -> list[tuple[Node, int]]:
    """A stack for each block drawn: its node on the stream and the last layer in it."""
    first, elided, last = drawn_layers(len(reading.model.blocks))
    stacks = [(block_stack(reading, layer), layer) for layer in first]
    if elided:
        stacks.append((elided_stack(reading, elided), elided[-1]))
    stacks += [(block_stack(reading, layer), layer) for layer in last]
    in_line([nodes for nodes, _ in stacks])
    for row, (nodes, _) in enumerate(stacks, start=1):
        grid.put(1, row, *nodes)
    return [(nodes[len(nodes) // 2], layer) for nodes, layer in stacks]


def in_line(stacks: list[list[Node]]):
    """Make the outer nodes of all stacks equally wide, so that the stream runs straight."""
    threes = [nodes for nodes in stacks if len(nodes) == 3]
    outer = max(max(nodes[0].width(), nodes[2].width()) for nodes in threes)
    inner = max(nodes[1].width() for nodes in threes)
    for first, middle, last in threes:
        first.least, middle.least, last.least = outer, inner, outer


def block_stack(reading: Reading, layer: int) -> list[Node]:
    block, name = reading.model.blocks[layer], f"blocks.{layer}"
    whole = part("stream", f"{name}.after_ffn", block)
    head = Node(name, (f"block {layer}", "MoE" if block.is_moe else "dense"), about=whole)
    latent = isinstance(block.attn, MultiHeadLatentAttention)
    key = "latent attention" if latent else "attention"
    attn = Node(
        f"{name}.attn",
        attention_lines(reading, block.attn),
        "scores",
        about=part(key, f"{name}.attn", block.attn),
    )
    about = part("moe" if block.is_moe else "swiglu", f"{name}.ffn", block.ffn)
    ffn = Node(f"{name}.ffn", ffn_lines(reading, block), ffn_role(block), about=about)
    return [head, attn, ffn]


def attention_lines(reading: Reading, attn) -> tuple[str, str]:
    cfg = reading.cfg
    if isinstance(attn, MultiHeadLatentAttention):
        return "latent attention", f"{plural(cfg.n_heads, 'head')}, latent {attn.r}"
    title = {1: "multi-query", cfg.n_heads: "multi-head"}.get(cfg.n_kv_heads, "grouped-query")
    window = f", window {cfg.attention.window}" if cfg.attention.window else ""
    return f"{title} attention", HEADS.format(cfg.n_heads, f"{cfg.n_kv_heads} KV{window}")


def ffn_lines(reading: Reading, block) -> tuple[str, str]:
    cfg = reading.cfg
    if not block.is_moe:
        return "SwiGLU", f"{cfg.d_model} to {cfg.d_ff} to {cfg.d_model}"
    shared = f" + {cfg.n_shared_experts} shared" if cfg.n_shared_experts else ""
    return "experts", f"{cfg.n_experts_active} of {cfg.n_experts}{shared}"


def ffn_role(block) -> str:
    return "experts" if block.is_moe else "shared"


def elided_stack(reading: Reading, layers: list[int]) -> list[Node]:
    moe = sum(reading.cfg.is_moe(layer) for layer in layers)
    kinds = [f"{n} {kind}" for n, kind in ((len(layers) - moe, "dense"), (moe, "MoE")) if n]
    title = f"and {len(layers)} more: blocks {layers[0]} to {layers[-1]}"
    about = part("stream", f"blocks.{layers[-1]}.after_ffn")
    return [Node("elided", (title, " and ".join(kinds)), about=about)]


def join_stream(grid: Grid, reading: Reading, nodes: list[Node], layers: list[int]):
    stages = ["embed", *(f"blocks.{layer}.after_ffn" for layer in layers)]
    for above, below, stage in zip(nodes, nodes[1:], stages, strict=False):
        grid.join(above, below, reading.label(stage), route="v", thick=True, place="right")
        grid.room_below(grid.cell_of[above].row, 40)


def rope_table(grid: Grid, reading: Reading, stacks: list[tuple[Node, int]]):
    """cos and sin, dashed, to every block whose layer is rotated."""
    model = reading.model
    turned = [
        grid.cell_of[node].nodes[0]
        for node, layer in stacks
        if model.cfg.position.rotates(layer) or node.name == "elided"
    ]
    if not any(model.cfg.position.rotates(layer) for layer in range(len(model.blocks))):
        return
    table = rope_node(reading)
    grid.put(0, (1 + len(stacks)) // 2, table)
    grid.join(table, turned, table_label(reading), route="hvh", dashed=True)


def rope_node(reading: Reading) -> Node:
    source = line_of(ModernDecoder, "self.rope(positions)")
    lines = ("RoPE table", f"base {reading.cfg.rope_theta:,.0f}")
    return Node("rope", lines, about=About("table", source=source))


def table_label(reading: Reading) -> Label:
    """The shape of cos (and of sin), asked of the table itself."""
    T = reading.trace["ids"].shape[-1]
    cos, _ = reading.model.rope(torch.arange(T))
    return Label(tuple(cos.shape), "T pairs", "cos, sin")
