"""The rules of the house, held by reading the source: layers, docstrings, sizes, encodings."""

import ast
import functools
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import course_lib

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "course_lib"
OURS = sorted(PACKAGE.rglob("*.py"))
ALL_PYTHON = sorted(
    path
    for top in ("course_lib", "tests", "tools", "benchmarks")
    for path in (ROOT / top).rglob("*.py")
)
SOURCES = sorted((ROOT / "notebooks/src").glob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


# --- layers ----------------------------------------------------------------------------------

# what a file may import besides the standard library and its own layer
LAYERS = {
    "model": {"torch"},
    "serving": {"torch", "course_lib.model"},
    "training": {"torch", "course_lib.model"},
    "zoo": {
        "torch",
        "numpy",
        "safetensors",
        "gguf",
        "tokenizers",
        "jinja2",
        "course_lib.model",
        "course_lib.serving",
    },
    "trace.py": {"torch", "course_lib.model", "course_lib.serving"},
    "__init__.py": {"course_lib.model", "course_lib.serving", "course_lib.training"},
    "__main__.py": {"torch", "course_lib", "course_lib.trace", "course_lib.zoo"},
}
# a two-line delegate by a late import
EXCEPTION = ("course_lib/model/decoder.py", "course_lib.serving")


def imports_of(path: Path) -> set[str]:
    """Full names of what a file imports, relative imports resolved, inside functions too."""
    found = set()
    here = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = here.rsplit(".", node.level)[0] + "." if node.level else ""
            found.add((base + (node.module or "")).rstrip("."))
    return found


def strays(path: Path, found: set[str]) -> list[str]:
    """Imports that the layer of `path` does not allow."""
    layer = path.relative_to(PACKAGE).parts[0]
    allowed = LAYERS[layer] | {f"course_lib.{layer.removesuffix('.py')}"}
    out = []
    for name in found:
        top = name.split(".")[0]
        inner = ".".join(name.split(".")[:2]) if top == "course_lib" else top
        fine = top in sys.stdlib_module_names or inner in allowed
        if not fine and (name_of(path), inner) != EXCEPTION:
            out.append(name)
    return sorted(out)


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_layers_import_only_what_lies_below(path):
    if path.relative_to(PACKAGE).parts[0] == "teaching":
        return
    assert strays(path, imports_of(path)) == []


def test_a_stray_import_is_seen():
    norm = PACKAGE / "model/norm.py"
    for name in ("numpy", "matplotlib.pyplot", "course_lib.serving.cache", "course_lib"):
        assert strays(norm, {name, "torch", "math"}) == [name]
    assert strays(PACKAGE / "trace.py", {"course_lib.teaching"}) == ["course_lib.teaching"]
    assert strays(PACKAGE / "model/decoder.py", {"course_lib.training"}) == ["course_lib.training"]
    assert "course_lib.model.checks" in imports_of(norm.with_name("masks.py"))
    assert "course_lib.serving.generate" in imports_of(norm.with_name("decoder.py"))


def test_importing_the_library_costs_torch_and_nothing_more():
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "from course_lib import Config, ModernDecoder\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    new = run.stdout.split()
    others = {name for name in new if name.split(".")[0] not in sys.stdlib_module_names}
    assert {name for name in others if not name.startswith("course_lib")} == set()
    layers = {name.split(".")[1] for name in others if "." in name}
    assert layers == {"model", "serving", "training"}


# --- public names ----------------------------------------------------------------------------

MODULES = {5: "rope", 6: "residual_and_norm", 7: "swiglu", 8: "masks", 9: "kv_heads"}
MODULES |= {10: "long_context", 11: "kv_cache", 12: "moe", 13: "training", 14: "inference"}
MODULES |= {15: "architectures", 16: "end_to_end"}
PLANNED = {n for n in MODULES if not (ROOT / f"notebooks/{n:02}_{MODULES[n]}.ipynb").is_file()}
HOMES = sorted(
    info.name
    for info in pkgutil.walk_packages([str(PACKAGE)], "course_lib.")
    if not info.name.startswith("course_lib.teaching") and not info.name.endswith("__main__")
)


def public_names():
    for home in ["course_lib", *HOMES]:
        for name in getattr(importlib.import_module(home), "__all__", []):
            yield home, name


def taught_in(docstring: str | None) -> int | None:
    """NN of the "Module NN." that a docstring ends with."""
    found = re.search(r"Module (\d\d)\.\s*$", docstring or "")
    return int(found[1]) if found else None


@pytest.mark.parametrize(("home", "name"), list(public_names()))
def test_a_public_name_says_what_it_is_and_where_it_is_taught(home, name):
    thing = getattr(importlib.import_module(home), name)
    module = taught_in(thing.__doc__)
    assert module is not None, f"{home}.{name} has no docstring that ends with 'Module NN.'"
    assert module in MODULES
    first = thing.__doc__.split("\n\n")[0].split(". ")[0]
    assert len(first.split()) > 3, "The first sentence says what it is."


# names that a notebook shows under another one: the text that must stand there instead
SHOWN_AS = {
    "Divergence": "diverge(",
    "ParameterCount": "count_parameters(",
    "RotaryTable": "model.rope",
    "Stage": "trace(",
    "Tap": "trace(",
    "Trace": "trace(",
}


def not_shown(module: int, text: str) -> list[str]:
    """Public names that say "Module NN" and do not stand in the source of that notebook."""
    names = {
        name
        for home, name in public_names()
        if taught_in(getattr(importlib.import_module(home), name).__doc__) == module
    }
    return sorted(
        name
        for name in names
        if SHOWN_AS.get(name, "\0") not in text and not re.search(rf"\b{name}\b", text)
    )


@pytest.mark.parametrize("module", sorted(set(MODULES) - PLANNED))
def test_a_notebook_that_exists_shows_the_names_it_teaches(module):
    source = ROOT / f"notebooks/src/{module:02}_{MODULES[module]}.py"
    assert not_shown(module, source.read_text(encoding="utf-8")) == []


def test_a_name_that_no_notebook_shows_is_seen():
    assert not_shown(6, "Block and RMSNorms") == ["RMSNorm"]


def test_a_docstring_without_its_module_is_seen():
    assert taught_in("Scale x.") is None and taught_in(None) is None
    assert taught_in("Scale x. Module 06. More.") is None
    assert taught_in("Scale x.\n\n    Module 06.") == 6


@pytest.mark.parametrize("home", ["course_lib", *HOMES])
def test_public_names_are_sorted_and_exist(home):
    module = importlib.import_module(home)
    names = getattr(module, "__all__", [])
    assert names == sorted(names, key=lambda name: (name.lower(), name)) or names == sorted(names)
    assert len(set(names)) == len(names) and all(hasattr(module, name) for name in names)


def test_every_public_name_is_used_by_a_test():
    others = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__).resolve()]
    words = set(re.findall(r"\w+", " ".join(p.read_text(encoding="utf-8") for p in others)))
    assert sorted({name for _, name in public_names()} - words) == []


# --- sizes -----------------------------------------------------------------------------------


def long_functions(path: Path, limit: int) -> list[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = (node for node in ast.walk(parse(path)) if isinstance(node, kinds))
    return [f.name for f in functions if f.end_lineno - f.lineno + 1 > limit]


@pytest.mark.parametrize("path", ALL_PYTHON, ids=name_of)
def test_functions_are_short(path):
    limit = 40 if path.parent.name == "model" and PACKAGE in path.parents else 60
    assert long_functions(path, limit) == []


def test_a_long_function_is_seen(tmp_path):
    path = tmp_path / "long.py"
    path.write_text("def f():\n" + "    x = 1\n" * 40, encoding="utf-8")
    assert long_functions(path, 40) == ["f"] and long_functions(path, 41) == []


@pytest.mark.parametrize("path", sorted((PACKAGE / "model").glob("*.py")), ids=name_of)
def test_files_of_the_model_are_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 200


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_a_file_opens_with_a_sentence(path):
    docstring = ast.get_docstring(parse(path))
    assert docstring and re.match(r"[A-Z`].*[.:]", docstring, re.DOTALL)


def stray_strings(tree: ast.Module) -> list[int]:
    """Lines of strings that stand as statements, too late to be a docstring."""
    bodies = (node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list))
    late = (statement for body in bodies for statement in body[1:])
    return [
        statement.lineno
        for statement in late
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    ]


@pytest.mark.parametrize("path", ALL_PYTHON, ids=name_of)
def test_a_docstring_comes_first(path):
    assert stray_strings(parse(path)) == []


def test_a_late_docstring_is_seen():
    assert stray_strings(ast.parse("def f():\n    x = 1\n    'Says what f does.'\n")) == [3]


# --- state -----------------------------------------------------------------------------------

MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
CHANGING = {"append", "update", "pop", "setdefault", "clear", "add", "extend", "remove", "insert"}


def state_of(tree: ast.Module) -> list[str]:
    """Module-level names that change: globals, caches, and literals that something writes to."""
    literals = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, MUTABLE)
        for target in node.targets
    } - {"__all__"}
    found = [name for name in literals if not name.isupper()]
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found += node.names
        elif isinstance(node, ast.Attribute) and node.attr in CHANGING:
            found += [node.value.id] if getattr(node.value, "id", None) in literals else []
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            found += [node.value.id] if getattr(node.value, "id", None) in literals else []
        elif isinstance(node, ast.FunctionDef):
            kept = [ast.unparse(d) for d in node.decorator_list]
            found += [node.name for d in kept if "cache" in d]
    return sorted(found)


@pytest.mark.parametrize("path", sorted((PACKAGE / "model").glob("*.py")), ids=name_of)
def test_the_model_keeps_no_state(path):
    assert state_of(parse(path)) == []


@pytest.mark.parametrize(
    "text",
    [
        "seen = []",
        "SEEN = {}\ndef f(x): SEEN[x] = 1",
        "SEEN = []\ndef f(x): SEEN.append(x)",
        "def f():\n    global x\n    x = 1",
        "@functools.cache\ndef f(): pass",
    ],
)
def test_state_is_seen(text):
    assert state_of(ast.parse(text)) != []


# --- encodings (A68: Windows opens text as cp1252) -------------------------------------------


def unencoded(tree: ast.Module) -> list[int]:
    """Lines that open text without saying its encoding."""
    lines = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        keywords = {keyword.arg for keyword in node.keywords}
        modes = [
            a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)
        ]
        modes += [k.value.value for k in node.keywords if k.arg == "mode"]
        binary = any(re.fullmatch(r"[rwax+]*b[rwax+]*", mode) for mode in modes)
        is_open = called == "open" and isinstance(node.func, ast.Name)
        place = {"read_text": 0, "write_text": 1, "open": 3}.get(called, -1)  # as an argument
        text = called in ("read_text", "write_text") or (is_open and not binary)
        if text and "encoding" not in keywords and len(node.args) <= place:
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("path", [*ALL_PYTHON, *SOURCES], ids=name_of)
def test_a68_text_is_opened_with_its_encoding(path):
    assert unencoded(parse(path)) == []


def test_a68_what_the_wrong_encoding_does():
    with pytest.raises(UnicodeDecodeError):
        "“ok”".encode().decode("cp1252")
    assert "café".encode().decode("cp1252") == "cafÃ©"
    with pytest.raises(UnicodeEncodeError):
        "θ".encode("cp1252")
    for text in ("open('a')", "p.read_text()", "p.write_text('x')", "open('a', 'w')"):
        assert unencoded(ast.parse(text)) == [1]
    for text in ("open('a', 'rb')", "p.read_text(encoding='utf-8')", "open(0, mode='wb')"):
        assert unencoded(ast.parse(text)) == []


def test_the_package_exports_what_its_layers_export():
    layers = [importlib.import_module(f"course_lib.{n}") for n in ("model", "serving", "training")]
    known = {name for layer in layers for name in layer.__all__}
    assert set(course_lib.__all__) <= known
    assert {"Config", "ModernDecoder", "generate", "training_step"} <= set(course_lib.__all__)
