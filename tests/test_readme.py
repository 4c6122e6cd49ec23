"""The README is true in what can be checked: links, commands, the tree, the modules, the pins."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def missing_targets(text: str) -> list[str]:
    """Links and pictures to files that are not there, and anchors without their heading."""
    anchors = {h.strip().lower().replace(" ", "-") for h in re.findall(r"^#+ (.+)$", text, re.M)}
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    local = [t for t in targets if not t.startswith("http")]
    return [
        t for t in local if not (t[1:] in anchors if t[0] == "#" else (ROOT / t).is_file())
    ]  # fmt: skip


def missing_commands(text: str) -> list[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.M))
    named = set(re.findall(r"(?m)(?:`|^)make ([a-z]+)", text))
    return sorted(named - targets)


def wrong_modules(text: str) -> list[str]:
    """Notebooks that the table of modules does not link, and rows that say otherwise."""
    rows = dict(re.findall(r"^\| (\d\d) \|.*\| (.+?) \|$", text, re.M))
    there = {path.stem[:2]: path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    return [
        number
        for number in sorted(rows.keys() | there.keys())
        if there.get(number, "planned") not in rows.get(number, "")
    ]


def missing_folders(text: str) -> list[str]:
    """Names of the annotated tree that are no file or folder."""
    block = text.split("## What is where")[1].split("```")[1]
    found, parents = [], {}
    for line in block.strip("\n").splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        parents[depth] = name
        path = ROOT.joinpath(*(parents[d] for d in range(depth + 1)))
        found += [] if path.exists() else [str(path.relative_to(ROOT))]
    return found


CHECKS = (missing_targets, missing_commands, wrong_modules, missing_folders)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_readme_is_true(check):
    assert check(README) == []


MUTANTS = {
    missing_targets: ("figures/16_leak.png", "figures/16_flow.png"),
    missing_commands: ("`make slides`", "`make sliders`"),
    wrong_modules: ("[16_end_to_end.ipynb](notebooks/16_end_to_end.ipynb)", "planned"),
    missing_folders: ("  serving/ ", "  service/ "),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_each_check_sees_a_false_line(check):
    old, new = MUTANTS[check]
    assert old in README
    assert check(README.replace(old, new)) != []


def test_python_versions_are_those_of_the_pins():
    low, above = re.search(
        r'requires-python = ">=3\.(\d+),<3\.(\d+)"',
        (ROOT / "pyproject.toml").read_text(encoding="utf-8"),
    ).groups()
    assert f"Python 3.{low} to 3.{int(above) - 1}" in README


def test_the_first_screen_shows_what_it_is_a_picture_and_the_two_commands():
    first = README.splitlines()[:20]
    assert any(line.startswith("![") for line in first)
    assert [line.split()[1] for line in first if line.startswith("make ")] == ["lab", "test"]
