"""The generation stepper: one token a click, and what the next one is drawn from."""

from collections import OrderedDict
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from course_lib.serving import new_caches, next_token_probabilities
from course_lib.teaching.explorables.trained import smollm2, tokens_of, visible
from course_lib.teaching.explore import Explorable, Slider, Step, Text
from course_lib.teaching.panels import Bars, Heat, Note
from course_lib.zoo.counts import cache_bytes

MOST_PROMPT, MOST_NEW, MOST_K, SHOWN = 24, 8, 50, 8
MOST_KNOWN = 2048  # prefixes whose expectation is remembered
DICE = torch.rand(MOST_NEW, generator=torch.Generator().manual_seed(0))  # one throw a step


class Behind(NamedTuple):
    """What the model expects behind some tokens: its likeliest, which no top-k here exceeds."""

    ids: Tensor  # (MOST_K,), the likeliest first
    logits: Tensor
    probabilities: Tensor  # of all tokens, not of these alone


class Session:
    """The model with one cache that is kept between states: only what is not known is run."""

    def __init__(self):
        self.ids: list[int] = []  # the tokens in the caches
        self.caches = None
        self.known: OrderedDict[tuple[int, ...], Behind] = OrderedDict()
        self.ran = 0  # tokens that the last state had to run

    def after(self, ids: list[int]) -> Behind:
        """What is expected behind `ids`."""
        key = tuple(ids)
        if key not in self.known:
            self.run(ids)
            while len(self.known) > MOST_KNOWN:
                self.known.popitem(last=False)
        self.known.move_to_end(key)
        return self.known[key]

    def run(self, ids: list[int]):
        """Run what comes behind the tokens that the caches and `ids` have in common."""
        model, _ = smollm2()
        pairs = zip(ids[:-1], self.ids, strict=False)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.caches = self.caches or new_caches(model, MOST_PROMPT + MOST_NEW)
        for cache in self.caches:
            cache.trim(cache.length - kept)
        with torch.inference_mode():
            rows, _ = model(torch.tensor([ids[kept:]]), self.caches, kept)
            best = rows[0].topk(MOST_K, dim=-1)
            probabilities = rows[0].softmax(-1).gather(-1, best.indices)
        self.ids, self.ran = list(ids), self.ran + len(ids) - kept
        for n, behind in enumerate(zip(best.indices, best.values, probabilities, strict=True)):
            self.known[tuple(ids[: kept + n + 1])] = Behind(*behind)

    def compute(
        self, text: str, temperature: float, top_k: int, top_p: float, min_p: float, clicks: int
    ) -> dict:
        model, tokenizer = smollm2()
        ids = tokens_of(text, MOST_PROMPT)
        n_prompt, self.ran = len(ids), 0
        filters = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        for throw in DICE[:clicks]:
            if ids[-1] in tokenizer.eos_ids and len(ids) > n_prompt:
                break
            best = self.after(ids)
            ids.append(draw(best.ids, next_token_probabilities(best.logits, **filters), throw))
        best = self.after(ids)
        kept = next_token_probabilities(best.logits, **filters)
        return {
            "tokens": tokenizer.tokens(ids),
            "n_prompt": n_prompt,
            "labels": [visible(token) for token in tokenizer.tokens(best.ids[:SHOWN])],
            "own": best.probabilities[:SHOWN],
            "kept": kept[:SHOWN],
            "n_kept": int((kept > 0).sum()),
            "mass": float(kept.sum()),
            "ran": self.ran,
            "bytes": cache_bytes(model.cfg, len(ids), dtype=model.embed.weight.dtype),
            "cached": len(ids),
        }


def draw(ids: Tensor, probabilities: Tensor, throw: Tensor) -> int:
    """The token under which a throw from 0 to 1 falls, the likeliest first: the same dice
    give texts that can be compared."""
    reached = probabilities.cumsum(0)
    place = int(torch.searchsorted(reached, throw * reached[-1]))
    return int(ids[min(place, int((probabilities > 0).sum()) - 1)])


def view(data):
    ticks, labels = data["labels"], dict(ylabel="probability", fmt="{:.2f}", limits=(0, 1.0))
    own = Bars(data["own"], ticks, title="the model's own probabilities", role="stream", **labels)
    kept = Bars(
        data["kept"], ticks, title=f"what is drawn from: {data['n_kept']:,} tokens left",
        role="scores", **labels,
    )  # fmt: skip
    return [[own, kept], [cache_picture(data)], [Note(note(data), height=0.34)]]


def cache_picture(data) -> Heat:
    slots = MOST_PROMPT + MOST_NEW
    values = torch.zeros(1, slots)
    values[0, : data["cached"]] = 0.4
    values[0, data["n_prompt"] : data["cached"]] = 0.9
    return Heat(
        values, title=f"the cache: {data['cached']} tokens, {data['n_prompt']} of the prompt",
        xticks=range(slots), yticks=[""], xlabel="position", limits=(0, 1), square=False,
        hidden=torch.arange(slots)[None] >= data["cached"], hidden_label="free", height=0.4,
    )  # fmt: skip


def note(data) -> str:
    text = "".join(data["tokens"]).replace("\n", "⏎")
    shown = text if len(text) <= 100 else "…" + text[-99:]
    return f"{shown}\nrun for this state: {data['ran']} tokens; cache {data['bytes']:,} bytes"


def summary(data) -> str:
    best = f"{data['labels'][0]!r} {data['own'][0]:.2f}, drawn with {data['kept'][0]:.2f}"
    new = "".join(data["tokens"][data["n_prompt"] :])
    return f"{new!r} added, {data['cached']} tokens cached; next: {best} among {data['n_kept']:,}"


def alt(data) -> str:
    return (
        f"The likeliest next token is {data['labels'][0]!r} with {data['own'][0]:.0%}; after the "
        f"filters it is drawn with {data['kept'][0]:.0%}. The cache holds {data['cached']} tokens."
    )


def code(temperature, top_k, top_p, min_p, clicks) -> str:
    return (
        f"model.generate(ids, {max(clicks, 1)}, {temperature:g}, top_k={top_k}, "
        f"top_p={top_p:g}, min_p={min_p:g})"
    )


def disabled(temperature: float) -> dict[str, str]:
    reason = "at temperature 0 the likeliest token is taken, whatever is filtered"
    return {} if temperature else dict.fromkeys(("top_k", "top_p", "min_p"), reason)


def invariants(data, top_k: int, clicks: int):
    return [
        ("probabilities sum to 1", abs(data["mass"] - 1) < 1e-4),
        ("top-k keeps at most k", data["n_kept"] <= top_k),
        ("every token is cached", data["cached"] == len(data["tokens"])),
        ("no more is run than there is", data["ran"] <= len(data["tokens"])),
        ("at most one token a click", len(data["tokens"]) - data["n_prompt"] <= clicks),
    ]


def generation_stepper() -> Explorable:
    """SmolLM2 writes one token a click. Module 16."""
    return Explorable(
        "stepper",
        Session().compute,
        view,
        summary,
        controls=dict(
            text=Text("The capital of France is", label="prompt"),
            temperature=Slider(0.8, 0.0, 2.0, step=0.1, help="0 takes the likeliest token"),
            top_k=Slider(MOST_K, 1, MOST_K, log=True, label="top-k", unit="tokens"),
            top_p=Slider(1.0, 0.05, 1.0, step=0.05, label="top-p", help="mass to keep"),
            min_p=Slider(0.0, 0.0, 0.5, step=0.05, label="min-p", help="share of the largest"),
            clicks=Step("draw", limit=MOST_NEW, help="draw, append, run that token alone"),
        ),
        title="Where does the next token come from?",
        alt=alt,
        code=code,
        disabled=disabled,
        invariants=invariants,
        runs="smollm2",
        height=405,
    )
