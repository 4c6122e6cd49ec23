"""Notebooks are built from text, stored in one form, compared strictly; each rule seen failing."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tools import notebooks
from tools.contract import missing_twins, problems
from tools.normalise import WIDGET_VIEW, dumps, normalise
from tools.percent import read_source, write_source

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"

SOURCE = """\
# %% [markdown] id="title" slideshow={"slide_type": "slide"}
# # Tiny

# %% id="number"
x = 0.25
print(x)

# %% id="picture" tags=["float-tolerance"]
show(x)

# %% [markdown] id="after-picture" slideshow={"slide_type": "notes"}
# The line goes down.
"""
STREAM = nbformat.v4.new_output("stream", name="stdout", text="0.25\n")
PICTURE = nbformat.v4.new_output(
    "display_data", data={"image/png": "iVBORw0KGgo=", "text/plain": "<Figure size 640x480>"}
)


# The course's own notebooks


def test_every_notebook_has_its_source_and_every_source_its_notebook():
    assert list(FOLDER.glob("*.ipynb")), f"{FOLDER} holds no notebook."
    assert missing_twins(FOLDER) == []


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_stored_notebook_keeps_the_rules(path):
    assert problems(path) == []


# The rules, each on a small notebook that breaks it


@pytest.fixture
def tiny(tmp_path):
    """A folder with one good notebook, 01_tiny, and its source; nothing in it was executed."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src/01_tiny.py").write_text(SOURCE, encoding="utf-8")
    notebook = read_source(tmp_path / "src/01_tiny.py")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for count, (cell, output) in enumerate(zip(code, (STREAM, PICTURE), strict=True), 1):
        cell.execution_count, cell.outputs = count, [nbformat.from_dict(output)]
    (tmp_path / "01_tiny.ipynb").write_text(dumps(notebook), encoding="utf-8")
    return tmp_path


def stored(folder):
    return nbformat.read(folder / "01_tiny.ipynb", as_version=4)


def store(folder, notebook):
    (folder / "01_tiny.ipynb").write_text(dumps(notebook), encoding="utf-8")


def test_the_good_notebook_keeps_the_rules(tiny):
    assert problems(tiny / "01_tiny.ipynb") == []
    assert missing_twins(tiny) == []


def edit_source(nb):
    nb.cells[1].source += "\nx = 1"


def rename_cell(nb):
    nb.cells[1].id = "another-number"


def drop_last_cell(nb):
    nb.cells.pop()


def change_tags(nb):
    nb.cells[2].metadata.tags = ["nbval-skip"]


def keep_timing(nb):
    nb.cells[1].metadata.execution = {"iopub.execute_input": "2026-01-01T00:00:00Z"}


def keep_version(nb):
    nb.metadata.language_info.version = "3.12.1"


def keep_address(nb):
    nb.cells[1].outputs[0].text = "<object at 0x7f06f8cd5a10>"


def forget_to_run(nb):
    nb.cells[1].execution_count = None


def store_error(nb):
    error = {"ename": "KeyError", "evalue": "3", "traceback": ["KeyError: 3"]}
    nb.cells[1].outputs.append(nbformat.v4.new_output("error", **error))


def store_warning(nb):
    nb.cells[1].outputs[0].name = "stderr"


def print_a_path(nb):
    nb.cells[1].outputs[0].text = "saved to /home/ada/course/x.png\n"


def silence_the_figure(nb):
    nb.cells[3].cell_type = "raw"


MUTANTS = {
    edit_source: "cell number differs from src/01_tiny.py, and the .py wins",
    rename_cell: "cell number differs from src/01_tiny.py",
    drop_last_cell: "cell after-picture differs from src/01_tiny.py",
    change_tags: "cell picture differs from src/01_tiny.py",
    keep_timing: "it is not in its stored form. Run: make refresh NB=01_tiny",
    keep_version: "it is not in its stored form",
    keep_address: "it is not in its stored form",
    forget_to_run: "cell number: it was never executed",
    store_error: "cell number: it ends in KeyError: 3",
    store_warning: "cell number: it writes to stderr: '0.25'",
    print_a_path: "cell number: its output names a path of this machine: /home/ada/course/x.png",
    silence_the_figure: "cell picture: a figure has neither alt text nor text after it",
}


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_broken_rule_is_named(tiny, mutate):
    notebook = stored(tiny)
    mutate(notebook)
    store(tiny, notebook)
    found = problems(tiny / "01_tiny.ipynb")
    assert any(MUTANTS[mutate] in sentence for sentence in found), found


def test_how_to_take_an_edit_back_is_said(tiny):
    notebook = stored(tiny)
    edit_source(notebook)
    store(tiny, notebook)
    assert "python -m tools.notebooks adopt 01_tiny" in problems(tiny / "01_tiny.ipynb")[0]


def test_alt_text_speaks_for_a_figure(tiny):
    notebook = stored(tiny)
    silence_the_figure(notebook)
    notebook.cells[2].outputs[0].metadata = {"image/png": {"alt": "A falling line."}}
    store(tiny, notebook)
    assert "figure" not in " ".join(problems(tiny / "01_tiny.ipynb"))


def test_an_announced_error_may_be_stored(tiny):
    notebook = stored(tiny)
    store_error(notebook)
    notebook.cells[1].metadata.tags = ["raises-exception"]
    store(tiny, notebook)
    assert "KeyError" not in " ".join(problems(tiny / "01_tiny.ipynb"))


@pytest.mark.parametrize(
    ("code", "sentence"),
    [("x = 1\n" * 26, "26 lines of code"), (f"x = '{'y' * 100}'", "106 columns")],
)
def test_code_fits_the_screen(tiny, code, sentence):
    notebook = stored(tiny)
    notebook.cells[1].source = code.rstrip()
    store(tiny, notebook)
    assert any(sentence in problem for problem in problems(tiny / "01_tiny.ipynb"))


def test_a_missing_twin_is_named(tiny):
    (tiny / "src/02_new.py").write_text(SOURCE, encoding="utf-8")
    (tiny / "03_old.ipynb").write_text(
        (tiny / "01_tiny.ipynb").read_text(encoding="utf-8"), encoding="utf-8"
    )
    first, second = missing_twins(tiny)
    assert "03_old.ipynb has no src/03_old.py" in first
    assert "02_new.py has no notebook" in second


# The source format


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (' id="number"', "", r"01_tiny\.py:4: the cell has no id"),
        ('"picture"', '"number"', r"01_tiny\.py:8: id='number' is taken by the cell of line 4"),
        ('"number"', '"My Number"', r"01_tiny\.py:4: id='My Number' is not lower-case words"),
        ('"number"', '"c0ffee12"', r"01_tiny\.py:4: id='c0ffee12' is a random one"),
        ("tags=", "tag=", r"01_tiny\.py:8: 'tag' is not cell metadata"),
        ('# %% [markdown] id="title"', "x = 1  #", "4 cells under 3 '# %%' lines"),
    ],
)
def test_a_bad_header_is_refused_with_file_and_line(tiny, old, new, sentence):
    (tiny / "src/01_tiny.py").write_text(SOURCE.replace(old, new), encoding="utf-8")
    with pytest.raises(ValueError, match=sentence):
        read_source(tiny / "src/01_tiny.py")


def test_source_survives_the_round_trip(tiny):
    write_source(stored(tiny), tiny / "src/01_tiny.py")
    assert (tiny / "src/01_tiny.py").read_text(encoding="utf-8") == SOURCE


def test_normalise_twice_is_normalise_once(tiny):
    notebook = stored(tiny)
    keep_timing(notebook)
    keep_address(notebook)
    once = normalise(notebook)
    assert dumps(normalise(once)) == dumps(once)
    assert once.cells[1].outputs[0].text == "<object at 0x…>"


def test_a_widget_view_is_dropped_only_beside_another_form(tiny):
    view = {WIDGET_VIEW: {"model_id": "4f"}}
    notebook = stored(tiny)
    notebook.cells[1].outputs = [
        nbformat.v4.new_output("display_data", data={**view, "text/plain": "k=5"}),
        nbformat.v4.new_output("display_data", data=view),
    ]
    kinds = [list(output.data) for output in normalise(notebook).cells[1].outputs]
    assert kinds == [["text/plain"], [WIDGET_VIEW]]


# The commands


def test_build_keeps_outputs_of_unchanged_cells_only(tiny):
    (tiny / "src/01_tiny.py").write_text(SOURCE.replace("0.25", "0.5"), encoding="utf-8")
    notebooks.build(tiny, ["01_tiny"], jobs=1)
    number, picture = (cell for cell in stored(tiny).cells if cell.cell_type == "code")
    assert (number.source, number.outputs) == ("x = 0.5\nprint(x)", [])
    assert picture.outputs == [PICTURE]


def test_adopt_writes_the_source_and_asks_for_names(tiny, capsys):
    notebook = stored(tiny)
    edit_source(notebook)
    notebook.cells.insert(2, nbformat.v4.new_code_cell("y = 2", id="3f2a9c1e"))
    store(tiny, notebook)
    assert notebooks.adopt(tiny, ["01_tiny"], jobs=1) == 1
    text = (tiny / "src/01_tiny.py").read_text(encoding="utf-8")
    assert '# %% id="number"\nx = 0.25\nprint(x)\nx = 1\n' in text
    assert "id='3f2a9c1e' is a random one" in capsys.readouterr().err
    (tiny / "src/01_tiny.py").write_text(
        text.replace("3f2a9c1e", "second-number"), encoding="utf-8"
    )
    assert "second-number" in [cell.id for cell in read_source(tiny / "src/01_tiny.py").cells]


def test_refresh_twice_changes_no_byte(tiny, capsys):
    source = SOURCE.replace("show(x)", "print({'b', 'a', 'c'}, object())")
    (tiny / "src/01_tiny.py").write_text(source, encoding="utf-8")
    assert notebooks.refresh(tiny, ["01_tiny"], jobs=1) == 0
    assert "written, text changed in: picture" in capsys.readouterr().out
    first = (tiny / "01_tiny.ipynb").read_bytes()
    assert notebooks.refresh(tiny, ["01_tiny"], jobs=1) == 0
    assert "unchanged" in capsys.readouterr().out
    assert (tiny / "01_tiny.ipynb").read_bytes() == first


def test_refresh_keeps_the_timing_of_a_cell_that_is_not_compared(tiny, capsys):
    source = SOURCE.replace('["float-tolerance"]', '["nbval-ignore-output"]')
    source = source.replace("show(x)", "import time; print(time.time_ns())")
    (tiny / "src/01_tiny.py").write_text(source, encoding="utf-8")
    assert notebooks.refresh(tiny, ["01_tiny"], jobs=1) == 0
    first = (tiny / "01_tiny.ipynb").read_bytes()
    assert notebooks.refresh(tiny, ["01_tiny"], jobs=1) == 0
    assert (tiny / "01_tiny.ipynb").read_bytes() == first
    edited = source.replace("print(time", "print('edited', time")
    (tiny / "src/01_tiny.py").write_text(edited, encoding="utf-8")
    assert notebooks.refresh(tiny, ["01_tiny"], jobs=1) == 0
    assert "text changed in: picture" in capsys.readouterr().out
    assert any("edited" in output.text for output in stored(tiny).cells[2].outputs)


@pytest.mark.parametrize(
    ("code", "sentence"),
    [("1 / 0", "ZeroDivisionError: division by zero"), ("import os; os._exit(1)", "kernel died")],
)
def test_refresh_writes_nothing_after_an_error(tiny, capsys, code, sentence):
    before = (tiny / "01_tiny.ipynb").read_bytes()
    (tiny / "src/01_tiny.py").write_text(SOURCE.replace("show(x)", code), encoding="utf-8")
    assert notebooks.refresh(tiny, ["01_tiny"], jobs=1) == 1
    message = capsys.readouterr().err
    assert "01_tiny.ipynb: cell picture:" in message
    assert sentence in message
    assert (tiny / "01_tiny.ipynb").read_bytes() == before


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("build 02_new", "02_new is neither a notebook nor a source in"),
        ("adopt", "adopt overwrites sources, so it needs the notebook's name"),
        ("build notebooks/01_tiny.ipynb", "the cell has no id"),
    ],
)
def test_the_command_line_answers_in_sentences(tiny, command, sentence):
    (tiny / "src/01_tiny.py").write_text(SOURCE.replace(' id="number"', ""), encoding="utf-8")
    call = [sys.executable, "-m", "tools.notebooks", "--folder", tiny, *command.split()]
    run = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode != 0
    assert sentence in run.stderr
    assert "Traceback" not in run.stderr


# nbval as make test runs it


def notebook_of(*cells):
    """Make a notebook from (id, source, stored text, tags)."""
    made = [
        nbformat.v4.new_code_cell(
            source,
            id=name,
            execution_count=1,
            metadata={"tags": tags},
            outputs=[nbformat.v4.new_output("stream", name="stdout", text=text)] if text else [],
        )
        for name, source, text, tags in cells
    ]
    return normalise(nbformat.v4.new_notebook(cells=made))


@pytest.fixture(scope="module")
def nbval_report(tmp_path_factory):
    """Run two small notebooks under nbval once; return {cell id: PASSED or FAILED} and the text."""
    folder = tmp_path_factory.mktemp("nbval")
    tolerant = ["float-tolerance"]
    compared = notebook_of(
        ("exact-same", "print(0.5)", "0.5\n", []),
        ("exact-last-digit", "print(0.5001)", "0.5\n", []),
        ("tolerance-last-digit", "print(0.5001)", "0.5\n", tolerant),
        ("tolerance-too-far", "print(0.51)", "0.5\n", tolerant),
        ("tolerance-text", "print('b', 0.5)", "a 0.5\n", tolerant),
        ("address", "print(object())", "<object object at 0x…>\n", []),
        ("figure-size", "print('<Figure size 640x480>')", "<Figure size 500x300>\n", []),
        ("one-thread", "import os; print(os.environ['OMP_NUM_THREADS'])", "1\n", []),
        ("inline", "print(os.environ['MPLBACKEND'][-6:])", "inline\n", []),
        ("warning", "import warnings; warnings.warn('x')", "", []),
    )
    dies = notebook_of(
        ("alive", "print(1)", "1\n", []),
        ("death", "import os; os._exit(1)", "", []),
        ("after-death", "print(2)", "2\n", []),
    )
    for name, notebook in (("compared", compared), ("dies", dies)):
        (folder / f"{name}.ipynb").write_text(dumps(notebook), encoding="utf-8")
    return run_nbval(folder)


def run_nbval(folder):
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    options = ["-rA", "--color=no", "--nbval", "--nbval-current-env", "--nbval-cell-timeout", "60"]
    plugin = ["-p", "tools.nbval_strict", "-p", "no:cacheprovider", "--durations=0"]
    command = [sys.executable, "-m", "pytest", *plugin, *options, "--rootdir", folder, folder]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    lines = [line.split() for line in run.stdout.splitlines() if ".ipynb::" in line]
    verdicts = {
        words[1].split("::")[1]: words[0] for words in lines if words[0] in ("PASSED", "FAILED")
    }
    return verdicts, run.stdout


EXPECTED = {
    "exact-same": "PASSED",
    "exact-last-digit": "FAILED",
    "tolerance-last-digit": "PASSED",
    "tolerance-too-far": "FAILED",
    "tolerance-text": "FAILED",
    "address": "PASSED",
    "figure-size": "FAILED",
    "one-thread": "PASSED",
    "inline": "PASSED",
    "warning": "FAILED",
    "alive": "PASSED",
    "death": "FAILED",
    "after-death": "FAILED",
}


def test_nbval_compares_strictly_and_names_cells_by_id(nbval_report):
    verdicts, text = nbval_report
    assert verdicts == EXPECTED, text


def test_a_dead_kernel_is_noticed_within_seconds(nbval_report):
    _, text = nbval_report
    seconds = [line for line in text.splitlines() if line.endswith("::death")]
    assert "The kernel died in this cell." in text
    assert float(seconds[0].split("s ")[0]) < 5, seconds
