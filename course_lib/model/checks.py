"""How bad input is refused: ValueError with the value, the rule and what would work."""

import math
import os
import shutil
import sys
from dataclasses import fields


def require(ok: bool, problem: str, fix: str):
    """Raise ValueError("`problem` `fix`") unless `ok`. Module 16."""
    if not ok:
        raise ValueError(f"{problem} {fix}")


def is_whole(value, least: int) -> bool:
    """Whether `value` is an int (True is none) of at least `least`. Module 16."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value) -> bool:
    """Whether `value` is a finite int or float (True is none). Module 16."""
    whole_or_float = isinstance(value, (int, float)) and not isinstance(value, bool)
    return whole_or_float and math.isfinite(value)


def check_compiler(caller: str):
    """Refuse to compile where the compiler that torch.compile calls is missing."""
    usual = {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
    name = os.environ.get("CXX", usual)
    require(
        shutil.which(name) is not None,
        f"{caller} needs the C++ compiler {name!r}, which is not installed.",
        "Install it, name another in the variable CXX, or go on with the eager form.",
    )


def divisors(n: int) -> list[int]:
    """Every whole number that divides n. Module 16."""
    return [i for i in range(1, n + 1) if n % i == 0]


def example_of(part, name: str, fallback):
    """The default of a dataclass field if it is a number: a value that would work."""
    default = next(f.default for f in fields(part) if f.name == name)
    return default if is_number(default) else fallback


def check_whole(part, name: str, least: int):
    value = getattr(part, name)
    require(
        is_whole(value, least),
        f"{name}={value!r} is not a whole number of at least {least}.",
        f"Give an int, for example {name}={example_of(part, name, least)}.",
    )


def check_counts(part, *names: str):
    for name in names:
        check_whole(part, name, least=1)


def check_optional_count(part, name: str):
    if getattr(part, name) is not None:
        check_whole(part, name, least=1)


def check_positive(part, *names: str):
    for name in names:
        value = getattr(part, name)
        require(
            is_number(value) and value > 0,
            f"{name}={value!r} is not a positive finite number.",
            f"Give a number above 0, for example {name}={example_of(part, name, 1.0)}.",
        )


def check_flags(part, *names: str):
    for name in names:
        value = getattr(part, name)
        require(
            isinstance(value, bool),
            f"{name}={value!r} is neither True nor False.",
            "Give one of the two.",
        )


def check_choice(part, name: str, choices: tuple):
    value = getattr(part, name)
    require(
        value in choices, f"{name}={value!r} is unknown.", f"Choose from {choices}."
    )


def check_part(part, name: str, types: tuple):
    value = getattr(part, name)
    names = ", ".join("None" if t is type(None) else f"{t.__name__}()" for t in types)
    require(
        isinstance(value, types), f"{name}={value!r} is no such part.", f"Use {names}."
    )
