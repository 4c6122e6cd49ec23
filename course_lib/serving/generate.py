"""Text, one token at a time: prefill the prompt, then feed each new token to the cache."""

import torch
from torch import Tensor

from course_lib.model.checks import is_whole, require
from course_lib.model.inputs import check_attention_mask, check_ids

from .cache import new_caches
from .fast import FastDecoder, why_not_fast
from .sampling import check_sampling, sample


def left_pad(rows: list, pad_id: int = 0) -> tuple[Tensor, Tensor]:
    """Prompts of different length as one batch: ids (B, T) and attention_mask (B, T).

    Padding stands on the left, so that the last column is the newest token of each row.
    Raises ValueError for no rows or an empty one. Module 14."""
    require(
        len(rows) > 0 and all(len(row) > 0 for row in rows),
        f"rows={rows!r} holds an empty prompt, or none.",
        "Each row needs at least one token id, for example [[1, 2], [3]].",
    )
    longest = max(len(row) for row in rows)
    ids = [[pad_id] * (longest - len(row)) + list(row) for row in rows]
    real = [[False] * (longest - len(row)) + [True] * len(row) for row in rows]
    return torch.tensor(ids), torch.tensor(real)


def as_rows(value) -> list[list[int]] | None:
    """A list of rows of token ids, lists or tensors, as lists; None if it is none."""
    if not isinstance(value, (list, tuple)) or not value:
        return None
    rows = [row.tolist() if isinstance(row, Tensor) else row for row in value]
    are_rows = all(isinstance(row, (list, tuple)) for row in rows)
    return rows if are_rows and all(is_whole(i, least=0) for row in rows for i in row) else None


def as_batch(prompt_ids, attention_mask, pad_id: int) -> tuple[Tensor, Tensor]:
    """The prompt as ids (B, T), and which of them are real, (B, T)."""
    if not isinstance(prompt_ids, Tensor):
        rows = as_rows(prompt_ids)
        require(
            rows is not None,
            f"prompt_ids={prompt_ids!r} is no batch of prompts.",
            "Give ids of shape (B, T), or a list of lists of ints such as [[1, 2], [3]].",
        )
        require(
            attention_mask is None,
            f"attention_mask={attention_mask!r} beside a list of prompts.",
            "Lists are padded and masked here: leave it out.",
        )
        return left_pad(rows, pad_id)
    require(
        prompt_ids.dim() == 2 and prompt_ids.numel() > 0,
        f"prompt_ids of shape {tuple(prompt_ids.shape)} holds no prompt to continue.",
        "Give ids of shape (B, T) with at least one token, or a list of token lists.",
    )
    if attention_mask is None:
        return prompt_ids, torch.ones_like(prompt_ids, dtype=torch.bool)
    check_attention_mask(attention_mask, *prompt_ids.shape)
    require(
        bool(attention_mask[:, -1].all()),
        "attention_mask=False in the last column: the prompt is padded on the right.",
        "Pad on the left (left_pad does), so that each row ends with its newest token.",
    )
    return prompt_ids, attention_mask.bool()


def as_stops(eos_id, vocab_size: int) -> set[int]:
    """The ids that end a row, as a set."""
    ids = () if eos_id is None else eos_id if isinstance(eos_id, (list, tuple, set)) else (eos_id,)
    require(
        all(is_whole(stop, least=0) and stop < vocab_size for stop in ids),
        f"eos_id={eos_id!r} is no token of vocab_size={vocab_size}.",
        f"Give an id from 0 to {vocab_size - 1}, a list of them, or None.",
    )
    return set(ids)


def check_numbers(model, max_new_tokens, pad_id, seed):
    V = model.cfg.vocab_size
    require(
        is_whole(max_new_tokens, least=0),
        f"max_new_tokens={max_new_tokens!r} is not a number of tokens.",
        "Give an int of at least 0; 0 returns the prompt.",
    )
    require(
        is_whole(pad_id, least=0) and pad_id < V,
        f"pad_id={pad_id!r} is no token of vocab_size={V}.",
        f"Finished rows are filled with it: give an id from 0 to {V - 1}.",
    )
    require(
        seed is None or is_whole(seed, least=0),
        f"seed={seed!r} is no seed.",
        "Give an int of at least 0, or None to go on with torch's own generator.",
    )


def check_length(model, prompt: Tensor, real: Tensor, n: int):
    longest, limit = int(real.sum(1).max()), model.cfg.max_seq_len
    # the last new token is returned, never fed back, so it needs no position
    needed = longest + max(n, 1) - 1
    require(
        needed <= limit,
        f"max_new_tokens={n} after a prompt of {longest} tokens needs {needed} positions, "
        f"but max_seq_len={limit}.",
        f"Ask for at most {max(limit - longest + 1, 0)} new tokens.",
    )


def finish(token: Tensor, done: Tensor, stops: set[int], pad_id: int):
    """Column (B, 1) of new ids, padded where a row was done before, and who is done now."""
    token = token.masked_fill(done, pad_id)
    ended = torch.isin(token, token.new_tensor(sorted(stops)))
    return token.unsqueeze(1), done | ended


def readable_step(model, real: Tensor, capacity: int):
    """`model` itself over its caches; positions and padding follow from them."""
    caches = new_caches(model, capacity)

    def step(ids: Tensor) -> Tensor:
        first = caches[0].length == 0
        logits, _ = model(ids, caches, caches[0].length, real if first else None)
        return logits[:, -1]

    return step


def uncached_step(model, real: Tensor):
    """The whole sequence again at each step: slow, and what a cache must equal."""
    seen = []

    def step(ids: Tensor) -> Tensor:
        seen.append(ids)
        new = torch.ones_like(torch.cat(seen, dim=1)[:, real.shape[1] :], dtype=torch.bool)
        logits, _ = model(torch.cat(seen, dim=1), attention_mask=torch.cat((real, new), dim=1))
        return logits[:, -1]

    return step


ENGINES = ("fast", "readable")


def choose_step(model, prompt: Tensor, real: Tensor, n: int, engine, use_cache: bool):
    """The function from new ids (B, T) to logits (B, V): the one place that picks a form.

    "fast" where `why_not_fast` has nothing against it and no row is padded, else the model
    itself; an object is what `compile_decode` returned."""
    B, capacity = prompt.shape[0], prompt.shape[1] + n
    if not use_cache:
        return uncached_step(model, real)
    if not isinstance(engine, str):
        return engine.start(model, B, capacity)
    if engine == "fast" and bool(real.all()) and why_not_fast(model) is None:
        return FastDecoder(model, B, capacity).step
    return readable_step(model, real, capacity)


def continue_prompt(step, prompt: Tensor, n: int, draw, stops, pad_id) -> list[Tensor]:
    """At most n columns (B, 1): the prompt through `step`, then each new token."""
    done = torch.zeros_like(prompt[:, 0], dtype=torch.bool)
    new, ids = [], prompt
    while len(new) < n and not done.all():
        ids, done = finish(draw(step(ids)), done, stops, pad_id)
        new.append(ids)
    return new


def generate(
    model,
    prompt_ids,
    max_new_tokens: int = 20,
    temperature: float = 0.8,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    eos_id: int | list[int] | None = None,
    pad_id: int | None = None,
    attention_mask: Tensor | None = None,
    seed: int | None = None,
    use_cache: bool = True,
    engine="fast",
) -> Tensor:
    """Prompt and continuation, (B, T + n), n <= max_new_tokens.

    prompt_ids is (B, T), or a list of token lists of any lengths (padded on the left).
    A row that has drawn eos_id is filled with pad_id; when all rows have, it stops. A seed
    makes the draws repeatable and leaves torch's global generator alone. engine="readable"
    runs the model's own forward, "fast" the equal form of `serving.fast` where it applies,
    and the result of `compile_decode` a compiled one. Raises ValueError before anything is
    computed. Module 14."""
    check_sampling(temperature, top_k, top_p, min_p)
    stops = as_stops(eos_id, model.cfg.vocab_size)
    pad_id = min(stops, default=0) if pad_id is None else pad_id
    check_numbers(model, max_new_tokens, pad_id, seed)
    require(
        engine in ENGINES if isinstance(engine, str) else hasattr(engine, "start"),
        f"engine={engine!r} is unknown.",
        f"Choose from {ENGINES}, or pass what compile_decode(model, batch, capacity) returned.",
    )
    device = model.embed.weight.device
    prompt, real = (t.to(device) for t in as_batch(prompt_ids, attention_mask, pad_id))
    check_ids(prompt, model.cfg)
    check_length(model, prompt, real, max_new_tokens)
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    filters = dict(top_k=top_k, top_p=top_p, min_p=min_p)

    def draw(logits):
        return sample(logits, temperature, generator, **filters)

    with torch.inference_mode():
        step = choose_step(model, prompt, real, max_new_tokens, engine, use_cache)
        new = continue_prompt(step, prompt, max_new_tokens, draw, stops, pad_id)
        out = torch.cat((prompt, *new), dim=1)
    return out.clone()  # an inference tensor could not be trained on
