"""The cell of an exercise as the student finds it, and with the library's answer written in.

A notebook author pastes `exercise_stub(name)` into a code cell tagged `exercise:<name>`. Tools
run a notebook with every such cell answered by `fill_stubs(text of notebooks/src/NN_name.py)`.
"""

import ast
import inspect
import re
import textwrap

from .exercises import load
from .reveal import answer

CELL = re.compile(r"(?m)^# %%.*$")
TAG = re.compile(r'"exercise:(\w+)"')


def exercise_stub(name: str) -> str:
    """The text of the exercise's cell: the stub, and the line that checks it. Module 16."""
    return load(name).stub.rstrip()


def fill_stubs(source: str) -> str:
    """Write the library's answer into each cell tagged exercise:<name> of a py:percent text.

    Only the body of the stub changes; the rest of the cell stays. Module 16."""
    heads = [*CELL.finditer(source)]
    starts = [head.start() for head in heads] + [len(source)]
    parts, ends = [source[: starts[0]]], starts[1:]
    for head, end in zip(heads, ends, strict=True):
        cell, tag = source[head.end() : end], TAG.search(head.group())
        parts += [head.group(), fill_cell(tag.group(1), cell) if tag else cell]
    return "".join(parts)


def fill_cell(name: str, cell: str) -> str:
    """The cell with the stub's first class or function replaced by the library's answer."""
    made = (ast.ClassDef, ast.FunctionDef)
    node = next(n for n in ast.parse(cell).body if isinstance(n, made))
    lines = cell.splitlines()
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    answered = [*imports_for(answer(name)), "", "", *answer_text(name, node).splitlines()]
    return "\n".join(lines[: first - 1] + answered + lines[node.end_lineno :]) + "\n" * (
        len(cell) - len(cell.rstrip("\n"))
    )


def answer_text(name: str, stub: ast.ClassDef | ast.FunctionDef) -> str:
    """The library's text under the stub's own name; of a class, its forward."""
    text = textwrap.dedent(inspect.getsource(answer(name)))
    if isinstance(stub, ast.FunctionDef):
        return text.replace(f"def {answer(name).__name__}(", f"def {stub.name}(", 1)
    bases = ", ".join(map(ast.unparse, stub.bases))
    return f"class {stub.name}({bases}):\n" + textwrap.indent(text, "    ")


def imports_for(function) -> list[str]:
    """Import lines for the names that the text of a library function reads from its module."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names = sorted(read & function.__globals__.keys() - {function.__name__})
    return [f"from {function.__module__} import {', '.join(names)}"] if names else []
