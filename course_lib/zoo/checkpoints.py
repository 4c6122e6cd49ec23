"""A decoder as one safetensors file: its weights, and its Config in the metadata."""

import dataclasses
import json
from pathlib import Path

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from course_lib.model import (
    GQA,
    MLA,
    NTK,
    ALiBi,
    Config,
    Interpolation,
    Llama3,
    ModernDecoder,
    Rope,
    Router,
    YaRN,
)
from course_lib.model.checks import require

__all__ = ["load", "save"]

PARTS = {
    part.__name__: part
    for part in (ALiBi, Config, GQA, Interpolation, Llama3, MLA, NTK, Rope, Router, YaRN)
}
HEAD = "lm_head.weight"  # of a tied model not in the file: it is the embedding


def describe(part) -> dict:
    """A Config or one of its parts as plain values that JSON can hold. Module 16."""
    fields = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    plain = {n: describe(v) if dataclasses.is_dataclass(v) else v for n, v in fields.items()}
    return {"part": type(part).__name__, **plain}


def rebuild(described: dict):
    """The Config or part that `describe` was given; it checks itself again. Module 16."""
    fields = {n: rebuild(v) if isinstance(v, dict) else v for n, v in described.items()}
    name = fields.pop("part", None)
    require(name in PARTS, f"part={name!r} is unknown.", f"Choose from {sorted(PARTS)}.")
    return PARTS[name](**fields)


def save(model: ModernDecoder, path: str | Path):
    """Write the weights and the Config of `model` to `path`; a tied head is written once.

    Module 16."""
    from safetensors.torch import save_file

    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.cfg.tied:
        del weights[HEAD]
    save_file(weights, path, metadata={"config": json.dumps(describe(model.cfg))})


def common_prefix(names: set[str], wanted: set[str]) -> str | None:
    """What stands before every name and should not, such as "model." or "_orig_mod."."""
    for name in sorted(names):
        for known in wanted:
            if name.endswith("." + known):
                prefix = name.removesuffix(known)
                return prefix if all(n.startswith(prefix) for n in names) else None
    return None


def check_names(names: set[str], wanted: set[str]):
    """Raise ValueError that lists the names of weights missing or not known. Module 16."""
    missing, unexpected = sorted(wanted - names), sorted(names - wanted)
    prefix = common_prefix(names - {HEAD}, wanted)
    fix = f"All begin with {prefix!r}: cut it off." if prefix else "Is it for another Config?"
    require(
        not missing and not unexpected,
        f"weights: {len(missing)} missing {missing[:4]}, {len(unexpected)} unexpected "
        f"{unexpected[:4]}.",
        fix,
    )


def check_shapes(weights: dict[str, Tensor], wanted: dict[str, Tensor]):
    wrong = {
        name: (tuple(weights[name].shape), tuple(tensor.shape))
        for name, tensor in wanted.items()
        if weights[name].shape != tensor.shape
    }
    require(
        not wrong,
        "weights: "
        + "; ".join(f"{name}={got}, expected {right}" for name, (got, right) in wrong.items())
        + ".",
        "The Config in the file does not describe them: save the model again.",
    )


class Undrawn(TorchFunctionMode):
    """Within it `torch.nn.init` does nothing: drawing on the meta device gives no numbers
    and imports sympy, a second of each start."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


def build_decoder(cfg: Config, weights: dict[str, Tensor]) -> ModernDecoder:
    """A decoder in eval mode that uses `weights` themselves: nothing is drawn or copied.

    A tied model takes its head from the embedding. Raises ValueError for weights that are
    missing, unexpected or of another shape, naming them. Module 16."""
    with torch.device("meta"), Undrawn():
        model = ModernDecoder(cfg)
    if cfg.tied and "embed.weight" in weights:
        weights = {HEAD: weights["embed.weight"]} | weights
    check_names(set(weights), set(model.state_dict()))
    check_shapes(weights, model.state_dict())
    model.load_state_dict(weights, assign=True)
    return model.eval()


def read(path: str | Path) -> tuple[Config, dict[str, Tensor]]:
    """The Config and the tensors of a file that `save` wrote."""
    from safetensors import SafetensorError, safe_open

    require(Path(path).is_file(), f"path={str(path)!r} is no file.", "save(model, path) makes one.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise ValueError(
            f"path={str(path)!r} is no whole safetensors file ({error}). Save it again."
        ) from error
    require(
        "config" in metadata,
        f"path={str(path)!r} holds {len(weights)} tensors but no Config.",
        "It was not written by save(model, path): build the model and use load_state_dict.",
    )
    return rebuild(json.loads(metadata["config"])), weights


def load(path: str | Path) -> ModernDecoder:
    """The decoder that `save` wrote, in eval mode, its head tied again if it was.

    Raises ValueError for a file that is missing, no safetensors, without a Config, or whose
    names or shapes are not those of the model. Module 16."""
    return build_decoder(*read(path))
