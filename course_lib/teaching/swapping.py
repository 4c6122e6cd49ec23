"""Put a class that a student wrote into a decoder that already runs, on the same weights."""

import copy
import inspect

import torch
from torch import Tensor, nn

from course_lib.model.checks import require
from course_lib.serving import new_caches

from .exercise import Mismatch, build, fault_of

PARTS = ("attn", "ffn")
TOLERANCE = 1e-4  # of logits, absolute and relative


def swap(model, part: type[nn.Module], layer: int | None = None):
    """A copy of the decoder with class `part` as attention or feed-forward layer, in every block
    that it fits or in `layer` alone; prints whether the logits stay the same.

    `model` is left as it is; the copy shares its weights. What fits is found by the parameters
    of forward and the names of the weights. Raises ValueError where nothing fits, or where the
    class stops with an error. Module 16."""
    check_class(model, part, layer)
    swapped = share(model)
    layers = range(len(model.blocks)) if layer is None else [layer]
    placed, reasons = [], []
    for i in layers:
        try:
            reasons.append(place(swapped, part, i))
            placed += [i] if reasons[-1] is None else []
        except Exception as error:  # the student's constructor: a sentence, not its frames
            reasons.append(f"built for block {i}, {fault_of(error, part)}")
    require(bool(placed), f"part={part.__name__} fits no block: {reasons[0]}.", "Compare with "
            "the class that it is to replace, source(model.blocks[0].attn).")  # fmt: skip
    print(f"{part.__name__} runs in {in_words(placed)}: {verdict(model, swapped, part)}.")
    return swapped


def check_class(model, part, layer):
    require(
        inspect.isclass(part) and issubclass(part, nn.Module),
        f"part={getattr(part, '__name__', type(part).__name__)} is not a class of modules.",
        "Give the class itself, for example swap(model, MyAttention).",
    )
    n = len(model.blocks)
    require(
        layer is None or (isinstance(layer, int) and 0 <= layer < n),
        f"layer={layer!r} is not a layer of this model.",
        f"Give a number from 0 to {n - 1}, or None for all.",
    )


def share(model: nn.Module) -> nn.Module:
    """A copy with modules of its own on the very same parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, memo={id(t): t for t in tensors})


def place(model, part: type[nn.Module], layer: int) -> str | None:
    """Replace the part of one block that has the same forward; else say why not."""
    block = model.blocks[layer]
    for name in PARTS:
        old = getattr(block, name)
        if parameters_of(old.forward) != parameters_of(part.forward, skip=1):
            continue
        with torch.random.fork_rng(devices=[]):
            new = build(part, old.state_dict(), *arguments(part, model.cfg, layer))
        new.load_state_dict(old.state_dict(keep_vars=True), assign=True)
        setattr(block, name, new.train(old.training))
        return None
    return f"no part of block {layer} has forward({', '.join(parameters_of(part.forward, 1))})"


def parameters_of(function, skip: int = 0) -> list[str]:
    return list(inspect.signature(function).parameters)[skip:]


def arguments(part: type[nn.Module], cfg, layer: int) -> list:
    """What the class is built from, by the names of its constructor's parameters."""
    known = dict(cfg=cfg, layer=layer, d_model=cfg.d_model, d_ff=cfg.d_ff)
    wanted = parameters_of(part.__init__, skip=1)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise Mismatch(f"its constructor asks for {unknown[0]}, and only {list(known)} are known")
    return [known[name] for name in wanted]


def verdict(model, swapped, part) -> str:
    """Logits of both, all tokens at once and in cached steps, compared in words."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        draw = torch.Generator().manual_seed(0)
        T = min(8, model.cfg.max_seq_len)
        ids = torch.randint(model.cfg.vocab_size, (2, T), generator=draw)
        ids = ids.to(model.embed.weight.device)
        try:
            pairs = [(run(model, ids), run(swapped, ids)) for run in (at_once, in_steps)]
        except Exception as error:  # the student's class: a sentence says more than the frames
            raise ValueError(f"part={part.__name__}: {fault_of(error, part)}.") from None
    if all(torch.allclose(a, b, TOLERANCE, TOLERANCE) for a, b in pairs):
        return f"logits unchanged (< {TOLERANCE:g}: True), at once and with a cache"
    largest = max((a - b).abs().nan_to_num(torch.inf).max().item() for a, b in pairs)
    return f"logits change by up to {largest:.4f}, so it is not the same computation"


def at_once(model, ids: Tensor) -> Tensor:
    return model(ids)[0]


def in_steps(model, ids: Tensor) -> Tensor:
    """The first half as a prompt, one token, then the rest as one chunk."""
    caches, logits = new_caches(model), []
    T = ids.shape[1]
    for chunk in ids.split([n for n in (T // 2, 1, T - T // 2 - 1) if n], dim=1):
        logits.append(model(chunk, caches, caches[0].length)[0])
    return torch.cat(logits, dim=1)


def in_words(layers: list[int]) -> str:
    if len(layers) == 1:
        return f"layer {layers[0]}"
    together = layers == list(range(layers[0], layers[-1] + 1))
    return f"layers {layers[0]} to {layers[-1]}" if together else f"layers {layers}"
