"""The generation stepper: one token a click, and what the next one is drawn from."""

from functools import lru_cache
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from course_lib.serving import FastDecoder, next_token_probabilities
from course_lib.teaching.diagrams.reading import plural
from course_lib.teaching.explorables.trained import smollm2, tokens_of, visible
from course_lib.teaching.explore import Explorable, Slider, Step, Text
from course_lib.teaching.panels import Bars, Heat, Note
from course_lib.zoo.counts import cache_bytes

MOST_PROMPT, MOST_NEW, MOST_K, SHOWN = 24, 8, 50, 8
MOST_TEXTS = 4  # prompts whose cache is kept
# What a click draws with. It is kept with the click, so that a later change draws nothing again.
SETTINGS = dict(
    temperature=Slider(0.8, 0.0, 2.0, step=0.1, help="0 takes the likeliest token"),
    top_k=Slider(MOST_K, 1, MOST_K, log=True, label="top-k", unit="tokens"),
    top_p=Slider(1.0, 0.05, 1.0, step=0.05, label="top-p", help="mass to keep"),
    min_p=Slider(0.0, 0.0, 0.5, step=0.05, label="min-p", help="share of the largest"),
)
DICE = torch.rand(MOST_NEW, generator=torch.Generator().manual_seed(0))  # one throw a step


class Behind(NamedTuple):
    """What the model expects behind some tokens: its likeliest, which no top-k here exceeds."""

    ids: Tensor  # (MOST_K,), the likeliest first
    logits: Tensor
    probabilities: Tensor  # of all tokens, not of these alone


class Written:
    """A prompt and what was drawn behind it, kept in the cache of a decoder of its own."""

    def __init__(self):
        self.decoder = FastDecoder(smollm2()[0], 1, MOST_PROMPT + MOST_NEW)
        self.ids: list[int] = []  # the tokens in the cache
        self.behind: dict[int, Behind] = {}  # by the number of tokens before
        self.ran = 0  # tokens, so far

    def after(self, ids: list[int]) -> Behind:
        """What is expected behind `ids`; what they begin with as before is not run again."""
        pairs = zip(ids, self.ids, strict=False)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if kept < len(ids):
            self.decoder.length = kept  # what is cached behind is written over
            # the prompt as a whole, then token by token
            for new in [[token] for token in ids[kept:]] if kept else [ids]:
                logits = self.decoder.step(torch.tensor([new]))[0]
                self.behind[self.decoder.length] = expected(logits)
            self.ids, self.ran = list(ids), self.ran + len(ids) - kept
        return self.behind[len(ids)]


def expected(logits: Tensor) -> Behind:
    best = logits.topk(MOST_K)
    return Behind(best.indices, best.values, logits.softmax(-1)[best.indices])


class Session:
    """The last prompts, each as it was written on: to come back to one runs nothing again."""

    def __init__(self):
        self.written = lru_cache(MOST_TEXTS)(lambda text: Written())

    def compute(
        self, text: str, temperature: float, top_k: int, top_p: float, min_p: float, clicks: tuple
    ) -> dict:
        model, tokenizer = smollm2()
        ids = tokens_of(text, MOST_PROMPT)
        written, n_prompt = self.written(text), len(ids)
        before = written.ran
        for settings, throw in zip(clicks, DICE, strict=False):
            if ids[-1] in tokenizer.eos_ids and len(ids) > n_prompt:
                break
            best = written.after(ids)
            ids.append(draw(best.ids, probabilities(best, *settings), throw))
        best = written.after(ids)
        kept = probabilities(best, temperature, top_k, top_p, min_p)
        return {
            "tokens": tokenizer.tokens(ids),
            "n_prompt": n_prompt,
            "labels": [visible(token) for token in tokenizer.tokens(best.ids[:SHOWN])],
            "own": best.probabilities[:SHOWN],
            "kept": kept[:SHOWN],
            "n_kept": int((kept > 0).sum()),
            "mass": float(kept.sum()),
            "ran": written.ran - before,
            "bytes": cache_bytes(model.cfg, len(ids), dtype=model.embed.weight.dtype),
            "cached": len(ids),
        }


def probabilities(behind: Behind, *settings: float) -> Tensor:
    """What the next token is drawn from, among the likeliest; settings as in SETTINGS."""
    return next_token_probabilities(behind.logits, **dict(zip(SETTINGS, settings, strict=True)))


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
        data["kept"], ticks, title=f"what is drawn from: {plural(data['n_kept'], 'token')} left",
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
    ran = plural(data["ran"], "token")
    return f"{shown}\nrun for this state: {ran}; cache {data['bytes']:,} bytes"


def summary(data) -> str:
    best = f"{data['labels'][0]!r} {data['own'][0]:.2f}, drawn with {data['kept'][0]:.2f}"
    new = "".join(data["tokens"][data["n_prompt"] :])
    return f"{new!r} added, {data['cached']} tokens cached; next: {best} among {data['n_kept']:,}"


def alt(data) -> str:
    return (
        f"The likeliest next token is {data['labels'][0]!r} with {data['own'][0]:.0%}; after the "
        f"filters it is drawn with {data['kept'][0]:.0%}. The cache holds {data['cached']} tokens."
    )


def code(temperature, top_k, top_p, min_p) -> str:
    return (
        f"model.generate(ids, 1, {temperature:g}, top_k={top_k}, top_p={top_p:g}, min_p={min_p:g})"
    )


def disabled(temperature: float) -> dict[str, str]:
    reason = "at temperature 0 the likeliest token is taken, whatever is filtered"
    return {} if temperature else dict.fromkeys(("top_k", "top_p", "min_p"), reason)


def invariants(data, top_k: int, clicks: tuple):
    return [
        ("probabilities sum to 1", abs(data["mass"] - 1) < 1e-4),
        ("top-k keeps at most k", data["n_kept"] <= top_k),
        ("every token is cached", data["cached"] == len(data["tokens"])),
        ("no more is run than there is", data["ran"] <= len(data["tokens"])),
        ("at most one token a click", len(data["tokens"]) - data["n_prompt"] <= len(clicks)),
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
            **SETTINGS,
            clicks=Step(
                "draw",
                limit=MOST_NEW,
                records=SETTINGS,
                help="draw with these settings, append, run that token alone",
            ),
        ),
        title="Where does the next token come from?",
        alt=alt,
        code=code,
        disabled=disabled,
        remembered=1,  # so that the cache always follows the reader, token by token
        invariants=invariants,
        runs="smollm2",
        height=380,
    )
