"""Diagrams say what the trace says, for every Config, and nothing in them overlaps."""

import io
import itertools
import json
import re
from functools import cache
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image

from course_lib import Config, ModernDecoder, Router, new_caches
from course_lib.model import AttentionCore, RotaryTable
from course_lib.teaching import diagrams
from course_lib.teaching.diagrams import live_html
from course_lib.teaching.diagrams.grid import Grid
from course_lib.teaching.diagrams.shapes import Label, Node, Rect
from course_lib.teaching.diagrams.telling import PARTS, code_at
from course_lib.trace import Stage, Trace, expert_usage, trace
from tests.helpers import SMALL, VARIANTS, ids_of, small

SLACK = 0.06  # coordinates are rounded to hundredths
MORE = {
    "sigmoid, bias, groups, scaled": dict(
        router=Router("sigmoid", True, n_groups=3, n_groups_active=2, scaling=2.5)
    ),
    "64 experts": dict(n_experts=64),
    **{f"{n} layers": dict(n_layers=n) for n in (1, 2, 6, 7, 12)},
    "as published": {key: getattr(Config(), key) for key in SMALL},
    "large vocabulary": dict(vocab_size=128256, n_layers=1),
}
GRID = {**VARIANTS, **MORE}


def traces(cfg: Config, B: int = 2, T: int = 7):
    """The model, one pass, a prefill, and the decode step after it."""
    torch.manual_seed(3)
    model = ModernDecoder(cfg)
    ids = torch.randint(cfg.vocab_size, (B, T))
    caches = new_caches(model)
    prefill = trace(model, ids, caches, flops=False)
    decode = trace(model, ids[:, :1], caches, T, flops=False)
    return model, trace(model, ids), prefill, decode


@cache
def runs(name: str):
    """The traces of a named Config, made once: nothing changes them."""
    return traces(small(**GRID[name]))


@cache
def drawings(name: str) -> dict:
    return all_diagrams(*runs(name))


@pytest.fixture
def drawn():
    """All diagrams of a named Config, with the trace that each was drawn from."""
    return drawings


def all_diagrams(model, whole, prefill, decode) -> dict:
    last = len(model.blocks) - 1
    out = {
        "architecture": (diagrams.architecture(model, whole), whole),
        "block": (diagrams.block(model, whole, last), whole),
        "first block": (diagrams.block(model, whole, 0), whole),
        "decode block": (diagrams.block(model, decode, last), decode),
        "generation": (diagrams.generation(model, prefill, decode), None),
    }
    if model.cfg.n_moe_layers:
        out["moe"] = (diagrams.moe(model, whole), whole)
        out["decode moe"] = (diagrams.moe(model, decode), decode)
    return out


# -- geometry -------------------------------------------------------------------------------


def segments(edge) -> list[Rect]:
    """The legs of an edge as boxes of its line's width."""
    half = 2.5 if edge.thick else 0.8
    boxes = []
    for path in edge.paths:
        for (x0, y0), (x1, y1) in itertools.pairwise(path):
            x, y = min(x0, x1), min(y0, y1)
            boxes.append(Rect(x - half, y - half, abs(x1 - x0) + 2 * half, abs(y1 - y0) + 2 * half))
    return boxes


def overlap(a: Rect, b: Rect) -> bool:
    """Whether two boxes share more than the rounding of coordinates."""
    across = min(a.right, b.right) - max(a.x, b.x)
    down = min(a.bottom, b.bottom) - max(a.y, b.y)
    return across > SLACK and down > SLACK


def clashes(grid) -> list[str]:
    """Everything in a diagram that lies on something else."""
    nodes = [(f"node {node.name}", node.box) for node in grid.nodes]
    labels = [(f"label {t.words}", t.box) for edge in grid.edges for t in edge.texts]
    legs = [(f"edge {edge_name(edge)}", leg) for edge in grid.edges for leg in segments(edge)]
    foreign = [
        (f"edge {edge_name(edge)}", leg, {edge.source, *edge.targets})
        for edge in grid.edges
        for leg in segments(edge)
    ]
    pairs = [
        *itertools.combinations(nodes, 2),
        *itertools.combinations(labels, 2),
        *itertools.product(labels, nodes + legs),
    ]
    found = [f"{a} on {b}" for (a, box), (b, other) in pairs if overlap(box, other)]
    found += [
        f"{name} through {node.name}"
        for name, leg, ends in foreign
        for node in grid.nodes
        if node not in ends and overlap(leg, node.box)
    ]
    return found + texts_out_of_boxes(grid)


def edge_name(edge) -> str:
    return f"{edge.source.name} to {edge.targets[0].name}"


def texts_out_of_boxes(grid) -> list[str]:
    found, (width, height) = [], grid.size
    for node in grid.nodes:
        for text in node.texts():
            box = text.box
            wide = box.x < node.box.x or box.right > node.box.right
            high = box.y < node.box.y or box.bottom > node.box.bottom
            if wide or high:
                found.append(f"text {text.words!r} leaves node {node.name}")
    everything = [n.box for n in grid.nodes] + [t.box for e in grid.edges for t in e.texts]
    for box in everything:
        if box.x < 0 or box.y < 0 or box.right > width or box.bottom > height:
            found.append(f"{box} leaves the picture")
    return found


@pytest.mark.parametrize("name", GRID)
def test_nothing_overlaps(drawn, name):
    for kind, (diagram, _) in drawn(name).items():
        assert clashes(diagram.grid) == [], kind


def test_the_geometric_test_sees_a_planted_overlap(drawn):
    diagram = diagrams.block(*traces(small())[:2], 0)
    node = diagram.grid.nodes[8]
    node.box = node.box.moved(60, 0)
    assert clashes(diagram.grid)


def test_the_geometric_test_sees_a_text_too_wide():
    model, whole, *_ = traces(small())
    grid = diagrams.block(model, whole, 0).grid
    node = next(node for node in grid.nodes if node.name == "W_q")
    node.lines = (node.lines[0] + " and much more", node.lines[1])
    assert any("leaves node W_q" in clash for clash in clashes(grid))


@pytest.mark.parametrize("place", ["left", "right"])
def test_a_label_beside_a_narrow_column_pushes_its_neighbours_away(place):
    grid = Grid()
    above, below = Node("above", ("a",)), Node("below", ("b",))
    for column in (0, 2):
        grid.put(column, 0, Node(f"n{column}", ("neighbour",)), rows=2, tall=True)
    grid.put(1, 0, above)
    grid.put(1, 1, below)
    grid.join(above, below, Label((64, 128, 4096, 131072), "B H T S"), route="v", place=place)
    assert clashes(grid.arrange()) == []


# -- shapes ---------------------------------------------------------------------------------


def wrong_shapes(diagram, recorded: Trace) -> list[str]:
    """Labels that name a stage and show another shape or other axes than the trace has."""
    return [
        f"{label.stage}: {label.shape} {label.axes}"
        for edge in diagram.grid.edges
        for label in edge.labels
        if label.stage
        and (label.shape, label.axes) != (recorded[label.stage].shape, recorded[label.stage].axes)
    ]


@pytest.mark.parametrize("name", GRID)
def test_every_shape_is_the_traces(drawn, name):
    for kind, (diagram, recorded) in drawn(name).items():
        if recorded is not None:
            assert wrong_shapes(diagram, recorded) == [], kind


@pytest.mark.parametrize("name", GRID)
def test_every_stage_of_a_block_is_drawn(drawn, name):
    last = len(runs(name)[0].blocks) - 1
    diagram, recorded = drawn(name)["block"]
    shown = {label.stage for edge in diagram.grid.edges for label in edge.labels}
    inside = {"ffn.weights", "ffn.chosen"}  # those are drawn by moe
    names = {s.name for s in recorded.under(f"blocks.{last}")} - inside
    assert {f"blocks.{last}.{stage}" for stage in names} <= shown


def test_every_edge_shows_a_shape_or_continues_one(drawn):
    for name in GRID:
        for kind, (diagram, _) in drawn(name).items():
            for edge in diagram.grid.edges:
                after_fork = edge.source.kind == "dot" and edge.thick
                assert edge.labels or after_fork or edge.thick, (name, kind, edge.source.name)


def test_a_changed_trace_changes_the_picture():
    model, whole, *_ = traces(small())
    diagram = diagrams.block(model, whole, 0)
    stages = [
        Stage(s.name, s.axes, s.value[..., :-1], s.flops, s.source)
        if s.name == "blocks.0.attn.k_rotated"
        else s
        for s in whole
    ]
    mutant = diagrams.block(model, Trace(stages), 0)
    assert wrong_shapes(diagram, Trace(stages)) and wrong_shapes(mutant, whole)
    assert mutant.svg != diagram.svg and repr(mutant) != repr(diagram)


def test_shapes_that_no_stage_has_are_those_of_the_run():
    """Derived labels against hooks: the cache's tensors, experts' rows, queries that met keys."""
    for name in GRID:
        model, *_ = runs(name)
        ids, cfg = ids_of(model.cfg, 2, 7), model.cfg
        seen, whole = watch(model, ids), trace(model, ids, flops=False)
        last = len(model.blocks) - 1
        edges = diagrams.block(model, whole, last).grid.edges
        met = [e.labels[0].shape for e in edges if e.targets[0].name == "scores" and e.role == "q"]
        tables = {e.labels[0].shape for e in edges if e.source.name == "rope"}
        assert met == [seen["queries"]], name
        assert tables == ({seen["table"]} if seen["table"] else set()), name
        if cfg.n_moe_layers and cfg.n_experts <= SMALL["n_experts"]:
            rows = [
                label.shape
                for edge in diagrams.moe(model, whole, last).grid.edges
                for label in edge.labels
                if edge.source.name == "gather"
            ]
            assert rows == seen["rows"], name


def watch(model, ids) -> dict:
    """Shapes that hooks see in the last block of one pass."""
    seen: dict = {"rows": [], "table": None}
    block, handles = model.blocks[-1], []

    def on(module, key):
        def before(module, args):
            shape = tuple(args[0].shape)
            seen[key] = [*seen[key], shape] if key == "rows" else shape

        handles.append(module.register_forward_pre_hook(before))

    on(next(m for m in block.modules() if isinstance(m, AttentionCore)), "queries")
    for expert in block.ffn.experts if block.is_moe else []:
        on(expert, "rows")
    if model.cfg.position.rotates(len(model.blocks) - 1):
        hook = model.rope.register_forward_hook(
            lambda m, a, out: seen.update(table=tuple(out[0].shape))
        )
        handles.append(hook)
    model(ids)
    for handle in handles:
        handle.remove()
    return seen


def test_cached_shapes_are_those_of_the_cache(drawn):
    for name in GRID:
        model, *_ = runs(name)
        ids, caches = ids_of(model.cfg, 2, 7), new_caches(model)
        model(ids, caches)
        model(ids[:, :1], caches, 7)
        stored = sorted(tuple(tensor.shape) for tensor in caches[0].held())
        shown = sorted(
            label.shape
            for edge in drawn(name)["generation"][0].grid.edges
            if edge.caption == "reads all"
            for label in edge.labels
        )
        assert shown == stored, name


# -- what is drawn follows the Config -------------------------------------------------------


def names(diagram) -> set[str]:
    return {node.name for node in diagram.grid.nodes}


def titles(diagram) -> str:
    return " | ".join(" ".join(node.lines) for node in diagram.grid.nodes)


def test_the_block_follows_the_config(drawn):
    assert {"q_rope", "k_rope", "rope", "q_norm"} <= names(drawn("default")["block"][0])
    alibi = drawn("ALiBi")["block"][0]
    assert not {"q_rope", "rope"} & names(alibi) and "ALiBi" in titles(alibi)
    assert "window 3" in titles(drawn("window")["block"][0])
    assert "sink" in titles(drawn("sinks")["block"][0])
    assert "q_norm" not in names(drawn("no QK-Norm")["block"][0])
    assert "repeat × 4" in titles(drawn("multi-query")["block"][0])
    assert "repeat" not in titles(drawn("multi-head")["block"][0])
    assert "absorbed" in titles(drawn("MLA absorbed")["block"][0])
    assert "beside k_rope" in titles(drawn("MLA naive")["block"][0])
    assert "router logits" not in titles(drawn("dense")["block"][0])


def test_the_architecture_follows_the_config(drawn):
    assert "rope" not in names(drawn("ALiBi")["architecture"][0])
    tied = [
        e for e in drawn("default")["architecture"][0].grid.edges if e.targets[0].name == "lm_head"
    ]
    untied = [
        e for e in drawn("untied")["architecture"][0].grid.edges if e.targets[0].name == "lm_head"
    ]
    assert len(tied) == 2 and len(untied) == 1
    assert "and 7 more: blocks 3 to 9" in titles(drawn("12 layers")["architecture"][0])
    assert "more" not in titles(drawn("6 layers")["architecture"][0])
    rotated = [
        len(e.targets)
        for e in drawn("no rotation every second")["architecture"][0].grid.edges
        if e.source.name == "rope"
    ]
    assert rotated == [2]  # layers 0 and 2 of 3


def test_experts_show_the_tokens_they_got(drawn):
    diagram, recorded = drawn("default")["moe"]
    counts = expert_usage(recorded["blocks.1.ffn.chosen"].value, SMALL["n_experts"])
    for e, n in enumerate(counts):
        assert f"expert {e}: {n} token" in titles(diagram)
    many, recorded = drawn("64 experts")["moe"]
    counts = expert_usage(recorded["blocks.1.ffn.chosen"].value, 64)
    assert f"and 56 more: {sum(counts[8:])} slot" in titles(many)


def test_the_router_puts_its_softmax_where_its_kind_does(drawn):
    def order(name):
        grid = drawn(name)["moe"][0].grid
        lane = [n for n in grid.nodes if n.name == "top" or n.name.startswith(("before", "after"))]
        return [" ".join(n.lines) for n in sorted(lane, key=lambda n: n.box.x)]

    assert order("default") == ["top-2 of 6", "softmax over the 2"]
    assert order("softmax_all") == ["softmax over all 6", "top-2 of 6"]
    assert order("sigmoid, bias, groups, scaled")[-2:] == ["divide by their sum", "scale × 2.5"]
    assert order("sigmoid as it is") == ["sigmoid each score", "top-2 of 6"]


# -- forms ----------------------------------------------------------------------------------


def test_bytes_are_the_same_again():
    one, two = (diagrams.block(*traces(small())[:2], 1) for _ in range(2))
    assert one.svg == two.svg and one.png() == two.png() and one.html() == two.html()


def test_svg_is_well_formed_and_accessible(drawn):
    for diagram, _ in drawn("default").values():
        root = ElementTree.fromstring(diagram.svg)
        space = "{http://www.w3.org/2000/svg}"
        assert root.get("role") == "img" and root.find(f"{space}title").text
        assert "Steps:" in root.find(f"{space}desc").text
        for text in root.iter(f"{space}text"):
            assert float(text.get("textLength")) > 0


def test_html_asks_nothing_of_the_network(drawn):
    for diagram, _ in drawn("default").values():
        html = diagram.html().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|@import|<link|src=", html)


def test_a_cell_stores_a_picture_and_a_line_that_names_the_shapes(drawn):
    diagram, recorded = drawn("default")["block"]
    data, metadata = diagram._repr_mimebundle_()
    assert set(data) >= {"image/png", "text/plain", "application/vnd.jupyter.widget-view+json"}
    assert str(recorded["blocks.2.attn.q_rotated"].shape) in data["text/plain"]
    assert re.fullmatch(r"Diagram\(block 2: \d+ nodes; Q .*\)", data["text/plain"])
    assert "RoPE" in metadata["image/png"]["alt"]


def test_the_stored_png_carries_its_live_form(drawn):
    diagram, _ = drawn("default")["moe"]
    assert live_html(diagram.png()) == diagram.html()
    plain = io.BytesIO()
    Image.new("RGB", (2, 2)).save(plain, "PNG")
    assert live_html(plain.getvalue()) is None


# -- the side panel -------------------------------------------------------------------------


def test_formulas_quote_the_docstring_and_name_a_module():
    for name, part in PARTS.items():
        assert re.fullmatch(r"\d\d", part.module), name
        if part.quoted:
            assert part.formula in " ".join(part.teacher.__doc__.split()), name


def test_the_router_tells_what_its_kind_does(drawn):
    told = json.loads(drawn("sigmoid")["moe"][0].panel)
    assert told["top"]["rows"]["note"].startswith("sigmoid scores, divided by the sum")


def test_saving_twice_changes_no_byte(drawn, tmp_path):
    diagram, _ = drawn("default")["generation"]
    paths = diagram.save("loop", tmp_path)
    assert [path.name for path in paths] == ["loop.svg", "loop.png"]
    before = [(path.stat().st_mtime_ns, path.read_bytes()) for path in paths]
    diagram.save("loop", tmp_path)
    assert before == [(path.stat().st_mtime_ns, path.read_bytes()) for path in paths]


def test_panels_tell_what_the_trace_has(drawn):
    diagram, recorded = drawn("default")["block"]
    rows = json.loads(diagram.panel)["W_q"]["rows"]
    stage = recorded["blocks.2.attn.q"]
    assert rows["bytes"].startswith(f"{stage.nbytes:,}") and rows["FLOPs"].startswith(
        f"{stage.flops:,}"
    )
    assert str(stage.shape) in rows["out"] and rows["source"] == f"course_lib/{stage.source}"
    assert rows["code"] == code_at(stage.source) and "self.W_q(x)" in rows["code"]
    assert rows["taught in"] == "module 09"


def test_every_panel_has_a_formula_a_source_and_a_module(drawn):
    for name in GRID:
        for kind, (diagram, _) in drawn(name).items():
            told = json.loads(diagram.panel)
            assert set(told) == {node.name for node in diagram.steps}, (name, kind)
            for node, panel in told.items():
                assert {"formula", "step"} & set(panel["rows"]) and panel["rows"]["taught in"], (
                    kind,
                    node,
                )


# -- bad input ------------------------------------------------------------------------------


def test_bad_calls_are_refused_with_a_sentence():
    model, whole, prefill, decode = traces(small())
    other, *_ = traces(small(n_layers=2))
    dense, dense_trace, *_ = traces(small(n_experts=0))
    cases = [
        (lambda: diagrams.block(model, whole, 3), "layer=3.*3 layers.*0 to 2"),
        (lambda: diagrams.block(model, whole, "1"), "layer='1'"),
        (lambda: diagrams.moe(model, whole, 0), r"layer=0 is dense.*\[1, 2\]"),
        (lambda: diagrams.moe(dense, dense_trace), "is dense.*n_experts above 0"),
        (lambda: diagrams.architecture(other, whole), "trace has 3 blocks.*2"),
        (lambda: diagrams.generation(model, decode, prefill), "decode step met 0 cached"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


def test_a_label_says_word_shape_and_axes():
    label = Label((1, 2), "B T", "ids")
    assert [words for words, _ in label.lines()] == ["ids (1, 2)", "B T"]


def test_the_table_is_asked_of_the_model():
    cfg = small()
    cos, _ = RotaryTable(cfg)(torch.arange(7))
    model, whole, *_ = traces(cfg)
    assert str(tuple(cos.shape)) in diagrams.architecture(model, whole).svg
