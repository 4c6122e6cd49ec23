"""Exercises on generation: one step with the right tokens at the right offset."""

import torch
from torch import Tensor

from course_lib.model import GQA, Config, ModernDecoder
from course_lib.serving import new_caches

from ..exercise import Case, Exercise, Mistake, named, same
from .inputs import weights_of, whole

# decode_step: from all tokens so far to the logits of the next one

STUB = '''\
def my_decode_step(model, caches, ids):
    """ids (B, P + T), of which the caches hold the first P, to next-token logits (B, V)."""
    # 1. The caches know how many tokens they hold: caches[0].length.
    # 2. Only the T tokens after these go through the model, and pos_offset says where they stand.
    # 3. The last of them predicts the next token.
    ...


decode_step = check("decode_step", my_decode_step).use
'''


def decode_step(model, caches: list, ids: Tensor) -> Tensor:
    """Next-token logits: ids (B, P + T), of which the caches hold P, to (B, V).

    Prefill is the step with P = 0, decoding the step with T = 1. Module 16."""
    held = caches[0].length
    logits, _ = model(ids[:, held:], caches, pos_offset=held)
    return logits[:, -1]


def decode_cases() -> list[Case]:
    sizes = dict(B=2, V=50)
    plain = Config(
        vocab_size=50, d_model=16, n_layers=2, n_heads=4, d_head=8, d_ff=24, n_experts=0,
        max_seq_len=64,
    )  # fmt: skip
    windowed = Config(
        vocab_size=50, d_model=16, n_layers=2, n_heads=4, d_head=8, d_ff=24, n_experts=0,
        max_seq_len=64, attention=GQA(window=4),
    )  # fmt: skip
    return [
        Case("a prompt of 5 tokens, then 1, 1 and 3 more", sizes,
             dict(model=decoder(plain), ids=whole(22, 50, 2, 10), ends=(5, 6, 7, 10))),
        Case("a window of 4 tokens, a prompt of 6, then 1 and 1 more", sizes,
             dict(model=decoder(windowed), ids=whole(23, 50, 2, 8), ends=(6, 7, 8))),
    ]  # fmt: skip


def decoder(cfg: Config) -> ModernDecoder:
    model = ModernDecoder(cfg, init=None)
    state = weights_of(model, seed=21)
    model.load_state_dict(state | {"lm_head.weight": state["embed.weight"]})  # tied
    return model.eval()


def run_decode(attempt, model, ids: Tensor, ends: tuple[int, ...]) -> dict:
    ran = []  # tokens of each pass through the model
    model.register_forward_pre_hook(lambda _, args: ran.append(args[0].shape[1]))
    caches, outputs = new_caches(model), {}
    for call, end in enumerate(ends, start=1):
        with torch.no_grad():
            logits = named(attempt(model, caches, ids[:, :end]), f"logits of call {call}")
        outputs |= logits
        outputs[f"the number of tokens cached after call {call}"] = caches[0].length
        outputs[f"the number of tokens put through the model by call {call}"] = sum(ran)
    with torch.no_grad():
        outputs["logits without a cache"] = model(ids)[0][:, -1]
    return outputs


def equals_a_full_pass(outputs: dict, case: Case) -> bool:
    last = outputs[f"logits of call {len(case.inputs['ends'])}"]
    full = outputs["logits without a cache"]
    return last.shape != full.shape or same(last, full, 1e-4)


def each_token_once(outputs: dict, case: Case) -> bool:
    calls = enumerate(case.inputs["ends"], start=1)
    key = "the number of tokens put through the model by call"
    return all(outputs[f"{key} {call}"] == end for call, end in calls)


def one_at_a_time(model, caches, ids):
    """Right: the new tokens one after the other."""
    for t in range(caches[0].length, ids.shape[1]):
        logits, _ = model(ids[:, t : t + 1], caches, t)
    return logits[:, 0]


def counted_from_the_end(model, caches, ids):
    """Right: the number of new tokens first, then the offset from it."""
    new = ids.shape[1] - caches[-1].length
    logits = model(ids[:, -new:], caches=caches, pos_offset=ids.shape[1] - new)[0]
    return logits.select(1, new - 1)


def first_position(model, caches, ids):
    held = caches[0].length
    return model(ids[:, held:], caches, held)[0][:, 0]


def mean_position(model, caches, ids):
    held = caches[0].length
    return model(ids[:, held:], caches, held)[0].mean(1)


def all_positions(model, caches, ids):
    held = caches[0].length
    return model(ids[:, held:], caches, held)[0]


def column_kept(model, caches, ids):
    return all_positions(model, caches, ids)[:, -1:]


def first_row(model, caches, ids):
    return all_positions(model, caches, ids)[0, -1]


def probabilities(model, caches, ids):
    return decode_step(model, caches, ids).softmax(-1)


def likeliest(model, caches, ids):
    return decode_step(model, caches, ids).argmax(-1)


def offset_zero(model, caches, ids):
    held = caches[0].length
    return model(ids[:, held:], caches)[0][:, -1]


def offset_of_all(model, caches, ids):
    held = caches[0].length
    return model(ids[:, held:], caches, ids.shape[1])[0][:, -1]


def offset_of_last(model, caches, ids):
    held = caches[0].length
    return model(ids[:, held:], caches, ids.shape[1] - 1)[0][:, -1]


def offset_one_less(model, caches, ids):
    held = caches[0].length
    return model(ids[:, held:], caches, max(held - 1, 0))[0][:, -1]


def offset_one_more(model, caches, ids):
    held = caches[0].length
    return model(ids[:, held:], caches, held + 1 if held else 0)[0][:, -1]


def offset_of_prompt(model, caches, ids):
    """The offset is set after the prompt and never moves on."""
    held = caches[0].length
    prompt = getattr(caches[0], "prompt", held)
    if held and not hasattr(caches[0], "prompt"):
        caches[0].prompt = held
    return model(ids[:, held:], caches, prompt)[0][:, -1]


def whole_again(model, caches, ids):
    return model(ids, caches, caches[0].length)[0][:, -1]


def whole_from_zero(model, caches, ids):
    return model(ids, caches, 0)[0][:, -1]


def last_token_only(model, caches, ids):
    return model(ids[:, -1:], caches, caches[0].length)[0][:, -1]


def without_caches(model, caches, ids):
    return model(ids)[0][:, -1]


def new_caches_each_time(model, caches, ids):
    return model(ids, new_caches(model), 0)[0][:, -1]


def caches_emptied(model, caches, ids):
    caches[:] = new_caches(model)
    return model(ids, caches, 0)[0][:, -1]


def caches_forgotten(model, caches, ids):
    held = caches[0].length
    return model(ids[:, held:], None, held)[0][:, -1]


def new_tokens_alone(model, caches, ids):
    """The caches count the tokens, but the model never sees them."""
    held = caches[0].length
    logits = model(ids[:, held:])[0][:, -1]
    model(ids[:, held:], caches, held)
    return logits


def length_moved_by_hand(model, caches, ids):
    logits = decode_step(model, caches, ids)
    for cache in caches:
        cache.length = cache.length + 1
    return logits


def rows_held(model, caches, ids):
    """P read from the stored keys: a rolling cache stores only its window."""
    held = caches[0].held()[0].shape[-2] if caches[0].held() else 0
    return model(ids[:, held:], caches, held)[0][:, -1]


def pair_not_taken_apart(model, caches, ids):
    held = caches[0].length
    return model(ids[:, held:], caches, held)[:, -1]


def axis_lost(model, caches, ids):
    held = caches[0].length
    new = ids[:, held:] if ids.shape[1] - held > 1 else ids[:, -1]
    return model(new, caches, held)[0][:, -1]


DECODE_MISTAKES = (
    Mistake("first position", "the first position was taken, not the last: only logits[:, -1] "
            "has seen every token", first_position),
    Mistake("mean of positions", "the positions were averaged: only the last one predicts the "
            "next token", mean_position),
    Mistake("all positions", "all positions came back, (B, T, V): the last one alone predicts "
            "the next token, logits[:, -1]", all_positions),
    Mistake("column kept", "the token axis is still there, (B, 1, V): logits[:, -1] drops it, "
            "logits[:, -1:] keeps it", column_kept),
    Mistake("first row", "only the first row of the batch came back: every row predicts its own "
            "next token", first_row),
    Mistake("probabilities", "these are probabilities: return logits, temperature and top-k come "
            "before the softmax", probabilities),
    Mistake("token instead of logits", "this is the likeliest token already: return its logits, "
            "the choice comes later", likeliest),
    Mistake("offset 0", "the tokens were put at position 0: the offset of the cached tokens is "
            "missing; the new ones, ids[:, P:], stand at pos_offset=P", offset_zero,
            whole_from_zero),
    Mistake("offset of all tokens", "the offset counts the new tokens too: it is the position of "
            "the first new token, the number of cached ones", offset_of_all),
    Mistake("offset of the last token", "the offset is the position of the last new token: it "
            "is that of the first, which differs when several are new", offset_of_last),
    Mistake("offset one too small", "the offset is one too small: positions count from 0, so "
            "after P cached tokens the next one stands at P", offset_one_less),
    Mistake("offset one too large", "the offset is one too large: positions count from 0, so "
            "after P cached tokens the next one stands at P", offset_one_more),
    Mistake("offset of the prompt", "the offset stays at the prompt's length: it moves on with "
            "every token, caches[0].length", offset_of_prompt),
    Mistake("whole sequence again", "the whole sequence went into the caches again: they now hold "
            "the old tokens twice; feed only ids[:, P:]", whole_again),
    Mistake("last token only", "only the last token went through the model: a prompt or a chunk "
            "has several new ones, ids[:, P:]", last_token_only),
    Mistake("no caches", "the logits are right, but the caches were not used: every step computes "
            "the whole sequence again", without_caches, new_caches_each_time, caches_forgotten),
    Mistake("caches emptied", "the logits are right, but the caches were emptied and filled "
            "again: every step computes the whole sequence", caches_emptied),
    Mistake("logits without the caches", "the logits come from a pass of the new tokens alone: "
            "take those of the pass with the caches", new_tokens_alone),
    Mistake("length moved by hand", "the caches' length was moved by hand: cache.update has "
            "already done so inside the model", length_moved_by_hand),
    Mistake("stored rows counted", "P was read from the stored keys: a rolling cache keeps only "
            "its window, caches[0].length counts all tokens so far", rows_held),
    Mistake("pair not taken apart", "the model returns a pair, (logits, router_logits): take the "
            "logits first", pair_not_taken_apart),
    Mistake("axis lost", "ids[:, -1] has lost its token axis: the model wants (B, T) also for "
            "one token, ids[:, -1:]", axis_lost),
)  # fmt: skip
CALLS = range(1, 5)

DECODE_STEP = Exercise(
    name="decode_step",
    module="16",
    prompt="Feed the tokens that the caches do not hold yet, and predict the one after them.",
    signature=("model", "caches", "ids"),
    reference=decode_step,
    stub=STUB,
    make_cases=decode_cases,
    run=run_decode,
    axes={f"logits of call {call}": "B V" for call in CALLS} | {"logits without a cache": "B V"},
    properties={
        "the last step gives what one pass over all tokens gives": equals_a_full_pass,
        "each token goes through the model once": each_token_once,
    },
    equivalents={
        "one token at a time": one_at_a_time,
        "counted from the end": counted_from_the_end,
    },
    mistakes=DECODE_MISTAKES,
)
