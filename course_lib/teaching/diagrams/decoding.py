"""Generation: the prompt fills the cache in one pass, then one token a pass goes round."""

from course_lib.model import ModernDecoder
from course_lib.model.checks import require
from course_lib.serving.generate import continue_prompt, readable_step
from course_lib.trace import Trace

from .diagram import Diagram
from .grid import Grid
from .reading import Reading, check_trace, plural
from .shapes import Label, Node
from .telling import About, line_of

IDS, MODEL, LAST, SAMPLE, TEXT = range(5)
PREFILL, CACHE, DECODE = range(3)


def generation(model: ModernDecoder, trace_prefill: Trace, trace_decode: Trace) -> Diagram:
    """Draw prefill and one decode step through the same cache, with the shapes of both traces.

    Raises ValueError if the second trace does not continue the first. Module 14."""
    for trace in (trace_prefill, trace_decode):
        check_trace(model, trace)
    prefill = Reading(model, trace_prefill, "blocks.0.")
    decode = Reading(model, trace_decode, "blocks.0.")
    offset = offset_of(prefill, decode)
    grid = Grid()
    first = forward_row(grid, prefill, "prefill", PREFILL, 0)
    then = forward_row(grid, decode, "decode", DECODE, offset)
    cache_between(grid, prefill, decode, first["model"], then["model"])
    sampled(grid, decode, first, then)
    ids = trace_decode["ids"].shape
    stored = "; ".join(words(x) for x in decode.cached(model.blocks[0].attn, read=True))
    summary = f"prompt {trace_prefill['ids'].shape}, step {ids} at {offset}, cache {stored}"
    return Diagram(grid.arrange(), "generation", "generation", summary, trace_decode)


def words(label: Label) -> str:
    return f"{label.word} {label.shape}"


def offset_of(prefill: Reading, decode: Reading) -> int:
    """P, the tokens in the cache before the decode step."""
    T, P = prefill.stage_of("ids").shape[-1], decode.keys - decode.stage_of("ids").shape[-1]
    if getattr(decode.cfg.attention, "window", None):
        return T  # a rolling cache forgets, so S no longer counts all tokens
    require(
        P >= T,
        f"the decode step met {P} cached tokens, but the prefill left {T}.",
        "Trace both through the same caches: trace(model, prompt, caches), then "
        "trace(model, token, caches, pos_offset=T).",
    )
    return P


def forward_row(grid: Grid, reading: Reading, phase: str, row: int, offset: int) -> dict[str, Node]:
    """ids, the model, and the logits of the last position."""
    T = reading.stage_of("ids").shape[-1]
    title = "prompt" if phase == "prefill" else "new token"
    at = f"position {offset}" if T == 1 else f"positions {offset} to {offset + T - 1}"
    about = About("ids", ("ids",), trace=reading.trace)
    tokens = Node(f"{phase} ids", (title, at), "stream", about=about)
    depth = plural(len(reading.model.blocks), "block")
    about = About("decoder", ("lm_head",), weights=reading.model, trace=reading.trace)
    lines = (f"{phase}: {depth}", f"pos_offset = {offset}")
    model = Node(f"{phase} model", lines, "stream", about=about)
    about = About("last", source=line_of(readable_step, "logits[:, -1]"), trace=reading.trace)
    last = Node(f"{phase} last", ("last position", "logits[:, -1]"), "stream", about=about)
    for column, node in ((IDS, tokens), (MODEL, model), (LAST, last)):
        grid.put(column, row, node)
    grid.join(tokens, model, reading.of("ids"))
    grid.join(model, last, reading.of("lm_head"))
    return {"ids": tokens, "model": model, "last": last}


def cache_between(grid: Grid, prefill: Reading, decode: Reading, first: Node, then: Node):
    """What prefill writes, and what a decode step reads and appends."""
    blocks = decode.model.blocks
    attn = blocks[0].attn
    held = decode.bytes_a_token(attn) * decode.keys * decode.stage_of("ids").shape[0]
    lines = ("cache of each block", f"{plural(decode.keys, 'token')}, {held:,} bytes")
    source = line_of(readable_step, "new_caches(")
    node = Node("cache", lines, "cache", about=About("cache", source=source, trace=decode.trace))
    grid.put(MODEL, CACHE, node)
    how = dict(route="v", role="cache")
    grid.join(
        first, node, *prefill.cached(attn, read=False), place="right", caption="writes", **how
    )
    grid.join(
        then,
        node,
        *decode.cached(attn, read=False),
        place="left",
        caption="appends",
        leave=-30,
        arrive=-30,
        **how,
    )
    grid.join(
        node,
        then,
        *decode.cached(attn, read=True),
        place="right",
        caption="reads all",
        leave=30,
        arrive=30,
        **how,
    )


def sampled(grid: Grid, decode: Reading, first: dict[str, Node], then: dict[str, Node]):
    """One sampler for both phases; its token goes around to the next step."""
    source = line_of(continue_prompt, "finish(draw(")
    about = About("sample", source=source, trace=decode.trace)
    draw = Node("sample", ("sample", "temperature, top-p"), "scores", about=about)
    about = About("loop", source=line_of(continue_prompt, "new.append("), trace=decode.trace)
    text = Node("append", ("append", "until EOS or n"), "stream", about=about)
    grid.put(SAMPLE, CACHE, draw)
    grid.put(TEXT, CACHE, text)
    B, _, V = decode.stage_of("lm_head").shape
    for row in (first, then):
        grid.join(row["last"], draw, Label((B, V), "B V"), route="hv")
    token = Label((B, 1), "B 1")
    grid.join(draw, text, token, role="scores")
    grid.join(text, then["ids"], token, role="scores", route="loop")
