"""Bring a notebook to its stored form: nothing depends on who ran it, when or where."""

import re
from pathlib import Path

import nbformat
from nbformat import NotebookNode

REPOSITORY = Path(__file__).resolve().parent.parent
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"

# No Python version here: it would change with the machine, and nothing reads it.
NOTEBOOK_METADATA = {
    "kernelspec": {
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "name": "python3",
    },
    "language_info": {
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "pygments_lexer": "ipython3",
    },
}
CELL_KEYS = ("jupyter", "slideshow", "tags")
PICTURE_KEYS = ("alt", "height", "width")

# Only addresses as Python prints them: a bare 0x[0-9a-f]+ would also eat "<Figure size 500x300>".
ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{6,}")
KERNEL_FILE = re.compile(r"\S*[/\\]ipykernel_\d+[/\\]\d+\.py")
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def scrub(text: str) -> str:
    """Replace addresses, the kernel's temporary files and this folder's path; strip colours."""
    text = ADDRESS.sub(f"at 0x{ELLIPSIS}", ANSI.sub("", text))
    text = KERNEL_FILE.sub("<cell>", text)
    return text.replace(f"{REPOSITORY}/", "").replace(str(REPOSITORY), ".")


def normalise(notebook: NotebookNode) -> NotebookNode:
    """Return the notebook in its stored form; ids, sources and what cells printed are kept."""
    cells = [_normalise_cell(cell) for cell in notebook.cells]
    return nbformat.from_dict(
        {"cells": cells, "metadata": NOTEBOOK_METADATA, "nbformat": 4, "nbformat_minor": 5}
    )


def dumps(notebook: NotebookNode) -> str:
    """Return the notebook's text as it is stored, after checking it against Jupyter's schema."""
    nbformat.validate(notebook)
    return nbformat.writes(notebook, version=nbformat.NO_CONVERT).rstrip("\n") + "\n"


def _normalise_cell(cell: NotebookNode) -> dict:
    kept = {
        "cell_type": cell.cell_type,
        "id": cell.id,
        "metadata": cell_metadata(cell.metadata),
        "source": cell.source.rstrip(),
    }
    if cell.cell_type == "code":
        kept["execution_count"] = cell.execution_count
        kept["outputs"] = [_normalise_output(output) for output in cell.outputs]
    return kept


def cell_metadata(metadata: dict) -> dict:
    """Keep what an author wrote, tags in order, and drop what an editor or a run left behind."""
    kept = {key: metadata[key] for key in CELL_KEYS if metadata.get(key)}
    if "tags" in kept:
        kept["tags"] = sorted(kept["tags"])
    return kept


def _normalise_output(output: NotebookNode) -> dict:
    output = dict(output)
    if output["output_type"] == "stream":
        output["text"] = scrub(output["text"])
    elif output["output_type"] == "error":
        # The frames name files and lines of this machine, and every edit moves them.
        output["evalue"] = scrub(output["evalue"])
        output["traceback"] = [f"{output['ename']}: {output['evalue']}"]
    else:
        output["metadata"] = _picture_metadata(output["metadata"])
        output["data"] = _normalise_bundle(output["data"])
    return output


def _normalise_bundle(bundle: dict) -> dict:
    # A widget's model id is random, and without its kernel the view shows nothing.
    views = {WIDGET_VIEW} if len(bundle) > 1 else set()
    return {
        kind: scrub(value) if isinstance(value, str) and not kind.startswith("image/p") else value
        for kind, value in bundle.items()
        if kind not in views
    }


def _picture_metadata(metadata: dict) -> dict:
    pictures = {
        kind: {key: value[key] for key in PICTURE_KEYS if key in value}
        for kind, value in metadata.items()
        if kind.startswith("image/")
    }
    return {kind: value for kind, value in pictures.items() if value}
