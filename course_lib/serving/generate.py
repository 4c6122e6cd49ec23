"""Text, one token at a time: prefill the prompt, then feed each new token to the cache."""

import torch
from torch import Tensor

from course_lib.model.checks import require

from .cache import new_caches
from .sampling import check_sampling, sample


def left_pad(rows: list, pad_id: int = 0) -> tuple[Tensor, Tensor]:
    """Prompts of different length as one batch: ids (B, T) and attention_mask (B, T).

    Padding stands on the left, so that the last column is the newest token of each row.
    Module 14."""
    longest = max(len(row) for row in rows)
    ids = [[pad_id] * (longest - len(row)) + list(row) for row in rows]
    real = [[False] * (longest - len(row)) + [True] * len(row) for row in rows]
    return torch.tensor(ids), torch.tensor(real)


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
) -> Tensor:
    """Prompt and continuation, (B, T + n), n <= max_new_tokens.

    prompt_ids is (B, T), or a list of token lists of any lengths (padded on the left).
    A row that has drawn eos_id is filled with pad_id; when all rows have, it stops. A seed
    makes the draws repeatable and leaves torch's global generator alone. Raises ValueError
    before the model runs. Module 14."""
    check_sampling(temperature, top_k, top_p, min_p)
    check_count(max_new_tokens)
    stops = as_stops(eos_id, model.cfg.vocab_size)
    pad_id = min(stops, default=0) if pad_id is None else pad_id
    prompt, real = as_batch(prompt_ids, attention_mask, pad_id)
    check_length(model, prompt, real, max_new_tokens)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    filters = dict(top_k=top_k, top_p=top_p, min_p=min_p)

    def draw(logits):
        return sample(logits, temperature, generator, **filters)

    with torch.inference_mode():
        steps = continue_cached if use_cache else continue_uncached
        new = steps(model, prompt, real, max_new_tokens, draw, stops, pad_id)
        out = torch.cat((prompt, *new), dim=1)
    return out.clone()  # an inference tensor could not be trained on


def continue_cached(model, prompt, real, n, draw, stops, pad_id) -> list[Tensor]:
    """Prefill, then one token a step; positions and padding follow from the caches."""
    caches = new_caches(model, capacity=prompt.shape[1] + n)
    done = torch.zeros(prompt.shape[0], dtype=torch.bool)
    new, ids = [], prompt
    while len(new) < n and not done.all():
        mask = real if not new else None
        logits, _ = model(ids, caches, caches[0].length, mask)
        ids, done = finish(draw(logits[:, -1]), done, stops, pad_id)
        new.append(ids)
    return new


def continue_uncached(model, prompt, real, n, draw, stops, pad_id) -> list[Tensor]:
    """The whole sequence again at each step: slow, and what the cache must equal."""
    done = torch.zeros(prompt.shape[0], dtype=torch.bool)
    new, ids = [], prompt
    while len(new) < n and not done.all():
        logits, _ = model(ids, attention_mask=real)
        column, done = finish(draw(logits[:, -1]), done, stops, pad_id)
        new.append(column)
        ids = torch.cat((ids, column), dim=1)
        real = torch.cat((real, torch.ones_like(column, dtype=torch.bool)), dim=1)
    return new


def finish(token: Tensor, done: Tensor, stops: set[int], pad_id: int):
    """Column (B, 1) of new ids, padded where a row was done before, and who is done now."""
    token = token.masked_fill(done, pad_id)
    ended = torch.isin(token, torch.tensor(sorted(stops), dtype=token.dtype))
    return token.unsqueeze(1), done | ended


def as_batch(prompt_ids, attention_mask, pad_id: int) -> tuple[Tensor, Tensor]:
    if isinstance(prompt_ids, Tensor):
        prompt = prompt_ids
        require(
            prompt.dim() == 2 and prompt.numel() > 0,
            f"prompt_ids of shape {tuple(prompt.shape)} holds no prompt to continue.",
            "Give ids of shape (B, T) with at least one token, or a list of token lists.",
        )
        everything = torch.ones_like(prompt, dtype=torch.bool)
        real = everything if attention_mask is None else attention_mask.bool()
        return prompt, real
    rows = [list(row) for row in prompt_ids] if is_rows(prompt_ids) else [[]]
    require(
        all(rows),
        "prompt_ids holds an empty prompt.",
        "Each row needs at least one token id, for example [[1, 2], [3]].",
    )
    return left_pad(rows, pad_id)


def is_rows(value) -> bool:
    nested = isinstance(value, (list, tuple)) and len(value) > 0
    return nested and all(isinstance(row, (list, tuple, Tensor)) for row in value)


def as_stops(eos_id, vocab_size: int) -> set[int]:
    stops = {eos_id} if isinstance(eos_id, int) else set(eos_id or ())
    require(
        all(isinstance(stop, int) and 0 <= stop < vocab_size for stop in stops),
        f"eos_id={eos_id!r} is no token of vocab_size={vocab_size}.",
        f"Give an id from 0 to {vocab_size - 1}, a list of them, or None.",
    )
    return stops


def check_count(max_new_tokens):
    require(
        isinstance(max_new_tokens, int)
        and not isinstance(max_new_tokens, bool)
        and max_new_tokens >= 0,
        f"max_new_tokens={max_new_tokens!r} is not a number of tokens.",
        "Give an int of at least 0; 0 returns the prompt.",
    )


def check_length(model, prompt: Tensor, real: Tensor, n: int):
    require(
        real.shape == prompt.shape,
        f"attention_mask={tuple(real.shape)} does not cover the prompt {tuple(prompt.shape)}.",
        "Give one entry for each token of the prompt.",
    )
    longest, limit = int(real.sum(1).max()), model.cfg.max_seq_len
    # the last new token is returned, never fed back, so it needs no position
    require(
        longest + max(n, 1) - 1 <= limit,
        f"prompt of {longest} tokens and max_new_tokens={n} need "
        f"{longest + max(n, 1) - 1} positions, but max_seq_len={limit}.",
        f"Ask for at most {max(limit - longest + 1, 0)} new tokens.",
    )
