"""How bad input is refused: ValueError with the value, the rule and what would work."""

import math
from dataclasses import fields


def require(ok: bool, problem: str, fix: str):
    """Raise ValueError(`problem` `fix`) unless `ok`. Module 16."""
    if not ok:
        raise ValueError(f"{problem} {fix}")


def divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def is_number(value) -> bool:
    whole_or_float = isinstance(value, (int, float)) and not isinstance(value, bool)
    return whole_or_float and math.isfinite(value)


def check_whole(part, name: str, least: int):
    value = getattr(part, name)
    require(
        isinstance(value, int) and not isinstance(value, bool) and value >= least,
        f"{name}={value!r} is not a whole number of at least {least}.",
        f"Give an int, for example {name}={field_default(part, name, least)}.",
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
            f"Give a number above 0, for example {name}={field_default(part, name, 1.0)}.",
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


def field_default(part, name: str, fallback):
    default = next(f.default for f in fields(part) if f.name == name)
    return default if is_number(default) else fallback
