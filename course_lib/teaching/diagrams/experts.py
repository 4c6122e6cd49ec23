"""A mixture of experts: route, gather, run each expert on its own tokens, scatter-add."""

from course_lib.model import ModernDecoder
from course_lib.model.moe import combine_sorted
from course_lib.model.moe import route as route_function
from course_lib.trace import Trace, expert_usage

from .diagram import Diagram
from .grid import Grid
from .reading import Reading, check_layer, check_trace, plural
from .shapes import Label, Node
from .telling import About, line_of, router_line

SHOWN = 8  # routed experts; of more, these first ones are drawn and the rest in one box
SHARED_SHOWN = 2
IN, FLAT, GATE, PICK, WEIGH, SUM, ADD, OUT = range(8)
ROUTER = 0  # the row of the router; the experts follow, then the shared ones


def moe(model: ModernDecoder, trace: Trace, layer: int | None = None) -> Diagram:
    """Draw the experts of one layer with the tokens that each got in this run.

    x (B, T, D) to the same; layer None is the first with experts. Raises ValueError for a
    dense layer. Module 12."""
    check_trace(model, trace)
    first = next((i for i, b in enumerate(model.blocks) if b.is_moe), 0)
    layer = check_layer(model, first if layer is None else layer, moe=True)
    reading, grid = Reading(model, trace, f"blocks.{layer}."), Grid()
    ffn = model.blocks[layer].ffn
    counts = expert_usage(reading.stage("ffn.chosen").value, len(ffn.experts))
    rows = drawn_rows(counts)
    flat = way_in(grid, reading, rows)
    gather, scatter = tall_nodes(grid, reading, ffn, rows)
    router = router_lane(grid, reading, ffn, gather, scatter)
    targets = [router[0], gather]
    experts = expert_rows(grid, reading, ffn, rows, gather, scatter)
    shared, add = shared_path(grid, reading, ffn, 1 + len(rows))
    grid.join(flat, [*targets, *shared[:1]], tokens(reading), route="hvh")
    way_out(grid, reading, scatter, shared, add, len(rows))
    grid.frame(f"router: {ffn.router.kind}", router, "router", left=30)
    title = f"{plural(len(ffn.experts), 'expert')}, {ffn.top_k} a token"
    grid.frame(title, [gather, scatter, *experts], "experts", centred=True)
    chosen = reading.stage("ffn.chosen").shape
    summary = f"chosen {chosen}, tokens by expert {short(counts)}"
    return Diagram(grid.arrange(), "moe", f"experts of block {layer}", summary, trace)


def short(counts: list[int]) -> str:
    shown = counts if len(counts) <= SHOWN else counts[:SHOWN]
    rest = (
        "" if len(counts) <= SHOWN else f" and {sum(counts[SHOWN:])} in {len(counts) - SHOWN} more"
    )
    return f"{shown}{rest}"


def drawn_rows(counts: list[int]) -> list[tuple[str, int]]:
    """Title and tokens of each row of experts; many experts end in one row for the rest."""
    rows = [(f"expert {e}", n) for e, n in enumerate(counts[:SHOWN])]
    if len(counts) > SHOWN:
        rows.append((f"and {len(counts) - SHOWN} more", sum(counts[SHOWN:])))
    return rows


def tokens(reading: Reading, n: int | None = None) -> Label:
    """A list of n tokens (N, D); all of the call unless given."""
    B, T, D = reading.stage("norm2").shape
    return Label((B * T if n is None else n, D), "N D" if n is None else "")


def step(reading: Reading, name: str, lines: tuple, role: str, key: str, *stages, **more) -> Node:
    about = About(key, tuple(f"{reading.prefix}{stage}" for stage in stages), **more)
    return Node(name, lines, role, about=about)


def way_in(grid: Grid, reading: Reading, rows: list) -> Node:
    ffn = type(reading.model.blocks[-1].ffn)
    x = step(reading, "x", ("x", "from RMSNorm"), "norm", "norm", "norm2")
    source = line_of(ffn, "x.flatten(")
    flat = step(reading, "flatten", ("flatten", "one list"), "stream", "flatten", source=source)
    grid.put(IN, ROUTER + 1, x, rows=len(rows))
    grid.put(FLAT, ROUTER + 1, flat, rows=len(rows))
    grid.join(x, flat, reading.label("norm2"))
    return flat


def tall_nodes(grid: Grid, reading: Reading, ffn, rows: list) -> tuple[Node, Node]:
    """gather and scatter-add, as tall as all rows of experts."""
    gathered = line_of(combine_sorted, "flat[token].split")
    added = line_of(combine_sorted, "index_add(")
    gather = step(reading, "gather", ("gather", "rows of each"), "router", "usage", source=gathered)
    scatter = step(
        reading, "scatter", ("scatter-add", "weight × row"), "stream", "moe", source=added
    )
    grid.put(PICK, ROUTER + 1, gather, rows=len(rows), tall=True, align=1)
    grid.put(SUM, ROUTER + 1, scatter, rows=len(rows), tall=True)
    return gather, scatter


# What the kinds of router do, in order; "top" is the choice and ends the first box.
BEFORE_TOP = {
    "softmax_selected": (),
    "softmax_all": (("softmax", "over all {E}"),),
    "softmax_renormalized": (("softmax", "over all {E}"),),
    "sigmoid": (("sigmoid", "each score"),),
}
AFTER_TOP = {
    "softmax_selected": (("softmax", "over the {k}"),),
    "softmax_all": (),
    "softmax_renormalized": (("divide", "by their sum"),),
    "sigmoid": (("divide", "by their sum"),),
}


def router_steps(ffn) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Titles up to the choice, and after it, as this layer's Router says."""
    router, sizes = ffn.router, dict(E=len(ffn.experts), k=ffn.top_k)
    before, after = list(BEFORE_TOP[router.kind]), list(AFTER_TOP[router.kind])
    if router.kind == "sigmoid" and not router.normalize:
        after = []
    if router.selection_bias:
        before.append(("+ bias", "choice only"))
    if router.n_groups > 1:
        before.append(("groups", f"{router.n_groups_active} of {router.n_groups} open"))
    if router.scaling != 1:
        after.append(("scale", f"× {router.scaling:g}"))
    before.append((f"top-{ffn.top_k}", "of {E}"))
    return tuple([(a, b.format(**sizes)) for a, b in part] for part in (before, after))


def router_lane(grid: Grid, reading: Reading, ffn, gather: Node, scatter: Node) -> list[Node]:
    """Gate, choice and weights, above the experts; indices go to gather, weights to the sum."""
    gate, pick, weigh = router_nodes(reading, ffn)
    top = pick[-1]
    grid.put(GATE, ROUTER, gate)
    grid.put(PICK, ROUTER, *pick, align=1)
    grid.room_below(ROUTER, 104)  # two frames and a label of three lines between them
    grid.join(gate, pick[0], reading.label("ffn.router_logits"), role="router")
    down = dict(role="router", route="v", place="right", nudge=-10)
    grid.join(top, gather, reading.label("ffn.chosen"), caption="indices", **down)
    if weigh:
        grid.put(WEIGH, ROUTER, *weigh)
        # the scores of the chosen experts, gathered by the indices and so of their shape
        grid.join(top, weigh[0], reading.like("ffn.chosen"), role="router", caption="their scores")
    how = dict(role="router", route="hv", caption="weights")
    grid.join([*pick, *weigh][-1], scatter, reading.label("ffn.weights"), **how)
    return [gate, *pick, *weigh]


def router_nodes(reading: Reading, ffn) -> tuple[Node, list[Node], list[Node]]:
    """The gate, the steps that end in the choice, and those that make weights of it."""
    logits = "ffn.router_logits"
    gate = step(reading, "gate", ("gate", "linear"), "router", "gate", logits, weights=ffn.gate)
    told = dict(note=router_line(ffn.router.kind))
    scored = line_of(route_function, "scores_of(")
    chosen = line_of(route_function, ".topk(")
    before, after = router_steps(ffn)
    pick = [
        step(reading, f"before{i}", lines, "router", "route", source=scored, **told)
        for i, lines in enumerate(before[:-1])
    ]
    top = step(reading, "top", before[-1], "router", "route", "ffn.chosen", source=chosen, **told)
    weigh = [
        step(reading, f"after{i}", lines, "router", "route", "ffn.weights", **told)
        for i, lines in enumerate(after)
    ]
    return gate, [*pick, top], weigh


def expert_rows(grid, reading, ffn, rows, gather, scatter) -> list[Node]:
    """One row for each expert drawn: its tokens in, as many rows out."""
    most = max(1, *(n for _, n in rows[:SHOWN]))
    nodes = [expert_node(ffn, i, *row, most) for i, row in enumerate(rows)]
    for i, (node, (_, n)) in enumerate(zip(nodes, rows, strict=True), start=ROUTER + 1):
        grid.put(WEIGH, i, node)
        how = dict(role=node.role, faint=n == 0, place="above")
        grid.join(gather, node, tokens(reading, n), **how)
        grid.join(node, scatter, tokens(reading, n), **how)
        grid.room_below(i, 5)
        node.least = max(other.width() for other in nodes)
    return nodes


def expert_node(ffn, i: int, title: str, n: int, most: int) -> Node:
    """One expert with its tokens and a bar; or all the rest, whose slots may share a token."""
    widths = f"{ffn.gate.in_features} to {ffn.experts[0].w_gate.out_features} and back"
    if i == SHOWN:
        about = About("swiglu", note=widths)
        return Node(title, (f"{title}: {plural(n, 'slot')}",), "experts", about=about)
    about = About("swiglu", weights=ffn.experts[i], note=widths)
    lines = (f"{title}: {plural(n, 'token')}",)
    return Node(title, lines, title, about=about, share=n / most)


def shared_path(grid: Grid, reading: Reading, ffn, row: int) -> tuple[list[Node], Node | None]:
    """The experts that every token goes to, and the sum with the routed ones."""
    n = len(ffn.shared)
    if not n:
        return [], None
    lines = ("shared expert" if n == 1 else f"{n} shared experts", "every token")
    node = Node("shared", lines, "shared", about=About("swiglu", weights=ffn.shared))
    grid.put(WEIGH, row, node)
    source = line_of(type(ffn), "out + expert(flat)")
    add = Node("add", ("+", "shared experts"), "shared", "add", about=About("moe", source=source))
    return [node], add


def way_out(grid, reading, scatter: Node, shared: list[Node], add: Node | None, rows: int):
    out = step(reading, "out", ("out", "to the stream"), "stream", "moe", "ffn")
    grid.put(OUT, ROUTER + 1, out, rows=rows)
    if add is None:
        grid.join(scatter, out, reading.label("ffn"))
        return
    grid.put(ADD, ROUTER + 1, add, rows=rows)
    grid.join(scatter, add, tokens(reading))
    grid.join(shared[0], add, tokens(reading), route="hv", role="shared")
    grid.join(add, out, reading.label("ffn"))
