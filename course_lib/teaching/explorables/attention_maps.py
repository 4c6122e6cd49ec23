"""Attention maps: what SmolLM2's heads look at in the reader's own sentence."""

import torch
from torch import Tensor

from course_lib.teaching.explorables.trained import smollm2, tokens_of, visible
from course_lib.teaching.explore import Choice, Explorable, Slider, Text
from course_lib.teaching.panels import Bars, Heat
from course_lib.trace import trace

MOST_TOKENS, LAYERS, HEADS, SHOWN = 28, 30, 9, 5  # layers and heads of SmolLM2
KINDS = ("weights", "scores")


def compute(text: str) -> dict:
    model, tokenizer = smollm2()
    ids = tokens_of(text, MOST_TOKENS)
    run = trace(model, torch.tensor([ids]), flops=False)
    layers = range(model.cfg.n_layers)
    maps = {
        kind: torch.stack([run[f"blocks.{i}.attn.{kind}"].value[0] for i in layers])
        for kind in KINDS
    }  # (L, H, T, T)
    best = run["lm_head"].value[0, -1].softmax(-1).topk(SHOWN)
    return maps | {
        "tokens": [visible(token) for token in tokenizer.tokens(ids)],
        "next": [visible(token) for token in tokenizer.tokens(best.indices)],
        "next_probabilities": best.values,
    }


def on_the_first(weights: Tensor) -> Tensor:
    """Mean weight that later tokens give to the first: (L, H, T, T) to (L, H)."""
    later = weights[:, :, 1:, 0]
    return later.mean(-1) if later.shape[-1] else weights[:, :, 0, 0]


def view(data, layer: int, head: int, kind: str):
    T = len(data["tokens"])
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    values = data[kind][layer, head].masked_fill(future, 0)
    scale = dict(limits=(0, 1)) if kind == "weights" else dict(scale="diverging")
    share = on_the_first(data["weights"])
    one = Heat(
        values, title=f"layer {layer}, head {head}: {kind}", xlabel="key", ylabel="query",
        xticks=data["tokens"], yticks=data["tokens"], hidden=future, hidden_label="the future",
        square=True, width=1.5, **scale,
    )  # fmt: skip
    overview = Heat(
        share, title="weight on the first token", xlabel="head", ylabel="layer", limits=(0, 1),
        xticks=range(share.shape[1]), yticks=range(share.shape[0]), square=False,
        pick={"x": "head", "y": "layer"}, mark=(layer, head), width=0.9,
    )  # fmt: skip
    guess = Bars(
        data["next_probabilities"], data["next"], title="the next token", ylabel="probability",
        fmt="{:.2f}", limits=(0, 1.0), width=0.9,
    )  # fmt: skip
    return [[one, overview, guess]]


def summary(data, layer: int, head: int, kind: str) -> str:
    share = on_the_first(data["weights"])
    return (
        f"{len(data['tokens'])} tokens, layer {layer}, head {head}, {kind}: weight on the first "
        f"token {share[layer, head]:.2f}, mean of all heads {share.mean():.2f}; next token "
        f"{data['next'][0]!r} {data['next_probabilities'][0]:.2f}"
    )


def alt(data, layer: int, head: int) -> str:
    share = on_the_first(data["weights"])[layer, head]
    return (
        f"Head {head} of layer {layer} gives {share:.0%} of its weight to the first token; the "
        f"model expects {data['next'][0]!r} next."
    )


def code(text: str, layer: int, head: int, kind: str) -> str:
    return f'trace(model, ids)["blocks.{layer}.attn.{kind}"].value[0, {head}]  # {text!r}'


def invariants(data):
    sums = data["weights"].sum(-1)
    return [
        ("weights sum to 1", bool(torch.allclose(sums, torch.ones_like(sums), atol=1e-4))),
        ("no weight on the future", float(data["weights"].triu(1).max()) == 0),
        ("all layers and heads", data["weights"].shape[:2] == (LAYERS, HEADS)),
    ]


def attention_maps() -> Explorable:
    """Every head of SmolLM2 on one's own sentence. Module 16."""
    return Explorable(
        "attention_maps",
        compute,
        view,
        summary,
        controls=dict(
            text=Text("The capital of France is", label="sentence"),
            layer=Slider(11, 0, LAYERS - 1),
            head=Slider(0, 0, HEADS - 1),
            kind=Choice("weights", KINDS, label="show", help="scores: before the softmax"),
        ),
        title="What does this head look at?",
        alt=alt,
        code=code,
        view_only=("layer", "head", "kind"),
        invariants=invariants,
        runs="smollm2",
        height=400,
    )
