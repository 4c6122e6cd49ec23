"""The generation stepper: one token a click, and what the next one is drawn from."""

import torch
from torch import Tensor

from course_lib.serving import new_caches, next_token_probabilities
from course_lib.teaching.explorables.trained import smollm2, tokens_of, visible
from course_lib.teaching.explore import Explorable, Slider, Step, Text
from course_lib.teaching.panels import Bars, Heat, Note

MOST_PROMPT, MOST_NEW, MOST_K, SHOWN = 24, 10, 50, 8
DICE = torch.rand(MOST_NEW, generator=torch.Generator().manual_seed(0))  # one throw a step


class Session:
    """The model with a cache that is kept between states: only tokens that changed are run."""

    def __init__(self):
        self.ids: list[int] = []
        self.caches = None
        self.logits: list[Tensor] = []  # behind each token, (V,)
        self.ran = 0  # tokens that the last state had to run

    def after(self, ids: list[int]) -> Tensor:
        """Logits (V,) behind the last of `ids`."""
        model, _ = smollm2()
        kept = 0
        while kept < min(len(ids), len(self.ids)) and ids[kept] == self.ids[kept]:
            kept += 1
        if kept == len(ids):  # known already, and what comes behind may be wanted again
            return self.logits[kept - 1]
        self.caches = self.caches or new_caches(model, MOST_PROMPT + MOST_NEW)
        for cache in self.caches:
            cache.trim(cache.length - kept)
        self.ids, self.logits = list(ids), self.logits[:kept]
        with torch.inference_mode():
            rows, _ = model(torch.tensor([ids[kept:]]), self.caches, kept)
        self.logits += list(rows[0])
        self.ran += len(ids) - kept
        return self.logits[-1]

    def compute(
        self, text: str, temperature: float, top_k: int, top_p: float, min_p: float, clicks: int
    ) -> dict:
        _, tokenizer = smollm2()
        ids = tokens_of(text, MOST_PROMPT)
        n_prompt, self.ran = len(ids), 0
        filters = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        for throw in DICE[:clicks]:
            if ids[-1] in tokenizer.eos_ids and len(ids) > n_prompt:
                break
            best = self.after(ids).topk(MOST_K)
            ids.append(draw(best.indices, next_token_probabilities(best.values, **filters), throw))
        logits = self.after(ids)
        # top-k, the first filter, keeps 50 at most: the other tokens need not be sorted
        best = logits.topk(MOST_K)
        kept = next_token_probabilities(best.values, **filters)
        return {
            "tokens": tokenizer.tokens(ids),
            "n_prompt": n_prompt,
            "labels": [visible(token) for token in tokenizer.tokens(best.indices[:SHOWN])],
            "own": logits.softmax(-1)[best.indices[:SHOWN]],
            "kept": kept[:SHOWN],
            "n_kept": int((kept > 0).sum()),
            "mass": float(kept.sum()),
            "ran": self.ran,
            "bytes": sum(cache.nbytes // cache.length for cache in self.caches) * len(ids),
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
        values, title=f"the cache: {data['cached']} tokens, the prompt's {data['n_prompt']} paler",
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
            text=Text("The capital of France is", label="prompt", longest=200),
            temperature=Slider(0.8, 0.0, 2.0, step=0.1, help="0 takes the likeliest token"),
            top_k=Slider(MOST_K, 1, MOST_K, log=True, label="top-k", unit="tokens"),
            top_p=Slider(1.0, 0.05, 1.0, step=0.05, label="top-p", help="mass to keep"),
            min_p=Slider(0.0, 0.0, 0.5, step=0.05, label="min-p", help="share of the largest"),
            clicks=Step("one token", limit=MOST_NEW, help="draw, append, run that token alone"),
        ),
        title="Where does the next token come from?",
        alt=alt,
        code=code,
        disabled=disabled,
        invariants=invariants,
        height=430,
    )
