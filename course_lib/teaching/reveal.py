"""Show the library's own text of a class, a function or an exercise's answer."""

import inspect
from dataclasses import dataclass
from pathlib import Path

from course_lib.model.checks import require

from .exercises import EXERCISES, load

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Source:
    """Python text with the file and lines it stands in; coloured in a notebook. Module 16."""

    text: str
    place: str  # "course_lib/model/moe.py, lines 107 to 121"

    def __repr__(self) -> str:
        return f"# {self.place}\n{self.text}"

    def _repr_html_(self) -> str:
        # the colours are JupyterLab's own variables: legible on light and dark
        from jupyterlab_pygments import JupyterStyle
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import PythonLexer

        return highlight(
            repr(self), PythonLexer(), HtmlFormatter(noclasses=True, style=JupyterStyle)
        )


def source(obj) -> Source:
    """The text of a class, function, method, module or object's class, with its file and lines.

    A string names an exercise: the text of its answer. Raises ValueError where there is no
    Python text. Module 16."""
    obj = answer(obj) if isinstance(obj, str) else obj
    if not (inspect.ismodule(obj) or inspect.isclass(obj) or inspect.isroutine(obj)):
        obj = type(obj)
    try:
        lines, first = inspect.getsourcelines(inspect.unwrap(obj))
        file = Path(inspect.getsourcefile(inspect.unwrap(obj)))
    except (OSError, TypeError):
        name = getattr(obj, "__name__", obj)
        require(False, f"obj={name} has no Python text.", "It is compiled, or typed at a prompt.")
    return Source("".join(lines).rstrip(), place_of(file, max(first, 1), len(lines)))


def answer(name: str):
    """What the student of an exercise writes: the function, or the forward of the class."""
    require(
        name in EXERCISES,
        f"exercise={name!r} is unknown.",
        f"Choose from {', '.join(EXERCISES)}, or give the class or function itself.",
    )
    reference = load(name).reference
    return reference.forward if inspect.isclass(reference) else reference


def place_of(file: Path, first: int, count: int) -> str:
    """No path of this machine: relative to the course, to the packages, or the name alone."""
    parts = file.parts
    if "site-packages" in parts:
        shown = "/".join(parts[parts.index("site-packages") + 1 :])
    elif file.is_relative_to(ROOT):
        shown = file.relative_to(ROOT).as_posix()
    else:
        shown = "this notebook"
    return f"{shown}, line{f's {first} to {first + count - 1}' if count > 1 else f' {first}'}"
