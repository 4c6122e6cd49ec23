"""The course's forms and transformers, each as something that can be prepared and run.

All of them read the same token ids, so that the same experts are chosen and the logits can be
compared; all run under inference_mode where nothing is trained."""

import torch

from benchmarks.rounds import Contender
from course_lib import Config, ModernDecoder, new_caches
from course_lib.serving import FastDecoder

LIMIT = 1e-5  # largest difference allowed between the course's own forms, for values up to 1
PEER_LIMIT = 1e-4  # and to a peer, whose sums run in another order


def course_model(**sizes) -> ModernDecoder:
    """A decoder with random weights, enlarged so that a wrong mapping of them would show."""
    torch.manual_seed(0)
    model = ModernDecoder(Config(**sizes)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.2)
            else:
                weight.mul_(10 if name.endswith("ffn.gate.weight") else 2.5)
    return model


def token_ids(model, batch: int, tokens: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(0, model.cfg.vocab_size, (batch, tokens), generator=draw)


def inference(run):
    return torch.inference_mode()(run)


class Peer:
    """A transformers model fed token by token."""

    def __init__(self, model):
        self.model = model

    def start(self, batch: int, capacity: int):
        cache = None

        @inference
        def step(ids):
            nonlocal cache
            # logits_to_keep=1 is what its own generate asks for
            out = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            return out.logits[:, -1]

        step.rewind = lambda n: cache.crop(-n)
        return step


class Readable:
    def __init__(self, model):
        self.model = model

    def start(self, batch: int, capacity: int):
        caches = new_caches(self.model, capacity)

        @inference
        def step(ids):
            return self.model(ids, caches, caches[0].length)[0][:, -1]

        step.rewind = lambda n: [cache.trim(n) for cache in caches]
        return step


class Fast:
    def __init__(self, model):
        self.model = model

    def start(self, batch: int, capacity: int):
        decoder = FastDecoder(self.model, batch, capacity)

        def step(ids):
            return decoder.step(ids)

        def rewind(n):
            decoder.length -= n

        step.rewind = rewind
        return step


class Compiled:
    def __init__(self, engine):
        self.engine = engine

    def start(self, batch: int, capacity: int):
        return self.engine.start(self.engine.model, batch, capacity)


def decoding(form, ids: torch.Tensor, context: int) -> Contender:
    """Prepare: the prompt of `context` tokens, or what was decoded behind it forgotten.

    Run: the other ids, one at a time."""
    new, used = ids.shape[1] - context, []

    def prepare():
        if used and hasattr(used[0], "rewind"):
            used[0].rewind(new)
            return used[0]
        step = form.start(*ids.shape)
        step(ids[:, :context])
        used[:] = [step]
        return step

    def run(step):
        for t in range(context, ids.shape[1]):
            logits = step(ids[:, t : t + 1])
        return logits

    return Contender(prepare, run)


def prefilling(form, ids: torch.Tensor) -> Contender:
    """Run: the whole prompt at once, from an empty cache to the logits behind it."""
    return Contender(lambda: form.start(*ids.shape), lambda step: step(ids))


def check_equal(contenders: dict, reference: str, peers: tuple = ()) -> dict:
    """Largest difference of each result to the reference's, as a share of the largest value
    where that exceeds 1; refuses one above its limit.

    Of a batch at most one row may exceed it against a peer: two router logits that nearly tie
    can be ranked differently where sums run in another order."""
    results = {name: c.run(c.prepare()) for name, c in contenders.items()}
    scale, found = max(1.0, float(results[reference].abs().max())), {}
    for name, result in results.items():
        rows = (result - results[reference]).abs().flatten(1).amax(1) / scale
        found[name] = float(rows.max())
        if name in peers:
            outside = int((rows > PEER_LIMIT).sum())
            assert outside <= len(rows) // 8, f"{name}: {outside} rows differ by {found[name]}"
        else:
            assert found[name] <= LIMIT, f"{name} differs from {reference} by {found[name]}"
    return found
