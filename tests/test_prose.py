"""Numbers in prose are what the cells print today, and a changed one is named with its place."""

from pathlib import Path

import nbformat
import pytest

from tools import prose

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BACKING = prose.Backing(
    "loss 6.8354, 55.4 %, shape (1, 8, 6, 32), 3,967,488 in all", "k=256", ("671B",)
)


def found(text: str) -> list[str]:
    return [f.numeral for f in prose.findings(text, BACKING, "cell x")]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_number_of_a_notebook_is_bound(path):
    problems = prose.check_notebook(path, prose.facts())
    assert not problems, "\n".join(map(str, problems))


def test_every_number_of_the_readme_is_bound():
    problems = prose.check_readme(ROOT / "README.md", NOTEBOOKS, prose.facts())
    assert not problems, "\n".join(map(str, problems))


def test_every_fact_names_its_source_and_is_quoted():
    from course_lib.teaching.facts import FACTS

    for text, (meaning, source) in FACTS.items():
        assert meaning and source, f"{text}: a fact needs its meaning and its source"
    unused = prose.unused_facts(NOTEBOOKS, ROOT / "README.md", tuple(FACTS))
    assert not unused, f"facts that nothing quotes: {unused}"


@pytest.mark.parametrize(
    "text",
    [
        "The loss is `6.8354` nats, `55.4 %` of `3,967,488` weights, in `(1, 8, 6, 32)`.",
        "In 2017 Vaswani et al. (arXiv 1706.03762, section 3.2.1) had 8 heads; see module 12.",
        "Math $x = 0.5 \\cdot 1000$ is exempt, so is $$\\ln 1000 = 6.9078$$ in display.",
        "DeepSeek-V3 has `671B` weights; a span of code, `Config(k=256)`, quotes the code.",
        "SmolLM2-135M is a name, Python 3.11 a version, ```` `x` ```` nothing.",
        "```python\nx = 12345\n```",
        "[a link](https://example.org/12345) and <img width=640>.",
    ],
)
def test_bound_and_exempt_numbers_pass(text):
    assert found(text) == []


@pytest.mark.parametrize(
    ("text", "numeral"),
    [
        ("The loss is 6.8354 nats.", "6.8354"),  # right, but unchecked
        ("The loss is `6.8355` nats.", "6.8355"),  # stale
        ("The loss is `6.835` nats.", "6.835"),  # not character for character
        ("About 55 % of them.", "55 %"),
        ("Some `54.4 %` of them.", "54.4 %"),
        ("A shape `(1, 2, 6, 32)`.", "(1, 2, 6, 32)"),
        ("There are 512 positions.", "512"),
        ("There are `3,967,489`.", "3,967,489"),
        ("There are `967,488`.", "967,488"),  # the tail of a printed number
        ("DeepSeek-V3 has `672B`.", "672"),
        ("`Config(k=257)` is no code of this notebook.", "257"),
    ],
)
def test_unbound_and_stale_numbers_are_found(text, numeral):
    assert found(text) == [numeral]


def test_the_message_names_file_cell_and_line(tmp_path):
    """Change one numeral of a paragraph by hand, as the acceptance asks."""
    (tmp_path / "src").mkdir()
    code = '# %% id="loss"\nprint(6.8354)\n\n'
    text = '# %% [markdown] id="reading"\n# First line.\n# The loss is `6.8454` nats.\n'
    (tmp_path / "src" / "nb.py").write_text(code + text, encoding="utf-8")
    cells = [
        nbformat.v4.new_code_cell(
            "print(6.8354)", id="loss", outputs=[nbformat.v4.new_output("stream", text="6.8354\n")]
        ),
        nbformat.v4.new_markdown_cell("First line.\nThe loss is `6.8454` nats.", id="reading"),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "nb.ipynb")
    (problem,) = map(str, prose.check_notebook(tmp_path / "nb.ipynb", ()))
    assert "nb.py:6 (cell reading, line 2)" in problem and "6.8454" in problem
