"""Build, execute, check and adopt notebooks.

python -m tools.notebooks build|refresh|check|adopt [NB...]
"""

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from tools.contract import missing_twins, problems, source_of, texts
from tools.execute import execute
from tools.normalise import dumps, normalise
from tools.percent import read_source, write_source
from tools.prose import check_notebook, facts

NOTEBOOKS = Path("notebooks")


def build(folder: Path, names: list[str], jobs: int) -> int:
    """Write each notebook from its source; outputs stay where the cell's source is unchanged."""
    for name in names:
        path = folder / f"{name}.ipynb"
        print(f"{name}: {'written' if write_if_changed(path, built(path)) else 'unchanged'}")
    return 0


def refresh(folder: Path, names: list[str], jobs: int) -> int:
    """Build and execute all, then write; where one cell fails, nothing is written at all."""
    paths = [folder / f"{name}.ipynb" for name in names]
    # Each kernel is a process of its own, so threads suffice to wait for them.
    with ThreadPoolExecutor(jobs) as pool:
        runs = list(pool.map(run, paths))
    failures = [
        f"{path}: {error}" for path, (_, error, _) in zip(paths, runs, strict=True) if error
    ]
    if failures:
        print(*failures, "Nothing was written.", sep="\n", file=sys.stderr)
        return 1
    for path, (fresh, _, seconds) in zip(paths, runs, strict=True):
        stored = read_stored(path)
        keep_uncompared(stored, fresh)
        state = "written" if write_if_changed(path, fresh) else "unchanged"
        changed = changed_texts(stored, fresh)
        tail = f", text changed in: {', '.join(changed)}" if changed else ""
        print(f"{path.stem}: {seconds:.1f} s, {state}{tail}")
    return check(folder, names, jobs)


def check(folder: Path, names: list[str], jobs: int) -> int:
    """Hold the stored notebooks, prose numbers included, to what needs no execution."""
    found, known = [*missing_twins(folder)], facts()
    for path in (folder / f"{name}.ipynb" for name in names):
        if path.exists():
            found += [*problems(path), *map(str, check_notebook(path, known))]
    print(*found, sep="\n", end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


def adopt(folder: Path, names: list[str], jobs: int) -> int:
    """Write the source from a notebook edited in JupyterLab; new cells still need a name."""
    for name in names:
        path = folder / f"{name}.ipynb"
        source = source_of(path)
        source.parent.mkdir(exist_ok=True)
        write_source(nbformat.read(path, as_version=4), source)
        print(
            f"{source}: written from {path}. Look at it with git diff, then: make refresh NB={name}"
        )
        try:
            read_source(source)
        except ValueError as error:
            print(f"Still to do: {error}", file=sys.stderr)
            return 1
    return 0


def built(path: Path) -> NotebookNode:
    """Return the source as a notebook, with the stored outputs of cells that did not change."""
    notebook = read_source(source_of(path))
    stored = {cell.id: cell for cell in read_stored(path).cells if cell.cell_type == "code"}
    for cell in notebook.cells:
        old = stored.get(cell.id)
        if cell.cell_type == "code" and old and old.source == cell.source:
            cell.outputs, cell.execution_count = old.outputs, old.execution_count
    return notebook


def run(path: Path) -> tuple[NotebookNode | None, str, float]:
    """Execute one notebook's source; return it normalised, or the error, and the seconds taken."""
    start = time.perf_counter()
    try:
        notebook = read_source(source_of(path))
        execute(notebook, path.parent)
    except (OSError, ValueError, RuntimeError) as error:
        return None, str(error), time.perf_counter() - start
    return normalise(notebook), "", time.perf_counter() - start


def keep_uncompared(stored: NotebookNode, fresh: NotebookNode) -> None:
    """Leave the stored outputs of cells that nbval does not compare, such as timings.

    So a second refresh changes no byte; an edited cell takes its new outputs."""
    before = {cell.id: cell for cell in stored.cells}
    for cell in fresh.cells:
        old = before.get(cell.id)
        tagged = "nbval-ignore-output" in cell.metadata.get("tags", [])
        if tagged and old and old.source == cell.source and old.outputs:
            cell.outputs = old.outputs


def read_stored(path: Path) -> NotebookNode:
    """Read a stored notebook in its normal form; one that is not there yet has no cells."""
    if not path.exists():
        return nbformat.v4.new_notebook()
    return normalise(nbformat.read(path, as_version=4))


def write_if_changed(path: Path, notebook: NotebookNode) -> bool:
    """Write the notebook where its bytes differ from the stored ones; say whether they did."""
    text = dumps(notebook)
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8")
    return True


def changed_texts(old: NotebookNode, new: NotebookNode) -> list[str]:
    """Return the ids of cells that print something else than before."""
    before = {cell.id: list(texts(cell)) for cell in old.cells}
    return [cell.id for cell in new.cells if before.get(cell.id, []) != list(texts(cell))]


def existing(path: Path) -> bool:
    """Say whether a notebook or its source is there."""
    return path.exists() or source_of(path).exists()


def stem(argument: str) -> str:
    """Accept 05_rope, notebooks/05_rope.ipynb and notebooks/src/05_rope.py for one notebook."""
    return Path(argument).stem


def main() -> int:
    """Parse the command line and run one command over the named notebooks, or over all."""
    commands = {"build": build, "refresh": refresh, "check": check, "adopt": adopt}
    parser = argparse.ArgumentParser(prog="python -m tools.notebooks")
    parser.add_argument("command", choices=commands)
    parser.add_argument("names", nargs="*", type=stem, metavar="NB")
    parser.add_argument("--folder", type=Path, default=NOTEBOOKS)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_intermixed_args()
    if arguments.command == "adopt" and not arguments.names:
        parser.error("adopt overwrites sources, so it needs the notebook's name.")
    names = arguments.names or sorted(p.stem for p in (arguments.folder / "src").glob("*.py"))
    if not names:
        parser.error(f"there is no source in {arguments.folder}/src.")
    missing = [name for name in names if not existing(arguments.folder / f"{name}.ipynb")]
    if missing:
        parser.error(f"{missing[0]} is neither a notebook nor a source in {arguments.folder}.")
    try:
        return commands[arguments.command](arguments.folder, names, arguments.jobs)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
