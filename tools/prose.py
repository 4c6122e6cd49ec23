"""Hold every number in prose to what a cell printed, or to a registered fact.

python -m tools.prose [NB...]      names each unbound or stale number with file, cell and line
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from tools.contract import source_of, texts

NOTEBOOKS = Path("notebooks")
README = Path("README.md")

# What must be bound: shape tuples, thousands groups, decimals, percentages, three or more digits.
NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.\d+(?:e[+-]?\d+)?|\d+e[+-]?\d+|\d+"
NUMERAL = re.compile(
    rf"(?P<tuple>\(\d+(?:,\s?\d+)+,?\)|\(\d+,\))|(?P<number>{NUMBER})(?P<rest>\s?%)?"
)

# What is no number of ours, blanked before looking: same length, so that lines stay in place.
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
EXEMPT = [
    FENCE,
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"\$\$.*?\$\$", re.DOTALL),
    re.compile(r"(?<!\\)\$[^$\n]+\$"),
    re.compile(r"\]\([^)\s]*\)"),  # the target of a link
    re.compile(r"<[a-zA-Z/][^>]*>"),
    re.compile(r"https?://\S+"),
    re.compile(r"\b\d{4}\.\d{4,5}(?:v\d+)?\b"),  # arXiv ids
    re.compile(
        r"\b(?:sections?|modules?|equations?|eqs?\.|chapters?|appendix|algorithm|figures?|tables?|"
        r"Python|version|torch|Apache|§)\s*[A-Z]?\d[\d.]*(?:(?:,| and| to|-|–)\s*\d[\d.]*)*",
        re.IGNORECASE,
    ),
    re.compile(r"^#+\s+\d[\d.]*", re.MULTILINE),  # numbered headings
]
YEAR = re.compile(r"(?:19|20)\d\d")
SPAN = re.compile(r"(`+)(.+?)\1")
CODE = re.compile(r"[A-Za-z_]\w*\s*[(=\[.]|==|\bfor\b")


@dataclass(frozen=True)
class Finding:
    """One number that nothing backs: where it stands and what is wrong with it."""

    place: str
    numeral: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.place}: {self.sentence}"


def must_be_bound(match: re.Match) -> bool:
    """A tuple, a percentage, a decimal point, or at least three digits."""
    if match["tuple"] or match["rest"]:
        return True
    number = match["number"]
    return "." in number or "e" in number or len(re.sub(r"\D", "", number)) >= 3


def blanked(text: str) -> str:
    """The prose with everything exempt replaced by spaces, line breaks kept."""
    for pattern in EXEMPT:
        text = pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)
    return text


def holds(text: str, numeral: str) -> bool:
    """Whether `numeral` stands in `text` as a whole number, character for character."""
    before = r"(?<![\d.])(?<!\d,)" if numeral[0].isdigit() else ""
    after = r"(?!\d)(?!\.\d)(?!,\d{3})" if numeral[-1].isdigit() else ""
    return re.search(before + re.escape(numeral) + after, text) is not None


@dataclass(frozen=True)
class Backing:
    """Where the numbers of one document may come from."""

    printed: str  # the text outputs of its cells
    code: str  # the source of its code cells, for numbers inside code spans
    facts: tuple[str, ...]  # texts of the registered facts

    def backs(self, span: str, numeral: str) -> bool:
        """Printed, a fact, or, in a span of code, code of this notebook."""
        if holds(self.printed, numeral) or any(holds(fact, numeral) for fact in self.facts):
            return True
        return bool(CODE.search(span)) and holds(self.code, numeral)


def numerals(text: str) -> Iterator[tuple[str, int, str | None]]:
    """Each numeral that must be bound: itself, its offset, and the code span around it."""
    prose = blanked(text)
    spans = [(m.start(2), m.end(2), m.group(2)) for m in SPAN.finditer(prose)]
    for match in NUMERAL.finditer(prose):
        if not must_be_bound(match):
            continue
        inside = next((s for a, b, s in spans if a <= match.start() and match.end() <= b), None)
        if glued(prose, match):
            continue
        if inside is None and YEAR.fullmatch(match.group()):
            continue
        yield match.group(), match.start(), inside


def glued(prose: str, match: re.Match) -> bool:
    """Part of a name such as bfloat16 or SmolLM2-135M: letters stand right before it."""
    return bool(re.search(r"(?:[A-Z]\w*-|[A-Za-z_])$", prose[: match.start()][-24:]))


def findings(text: str, backing: Backing, place: str, first_line: int = 1) -> Iterator[Finding]:
    """Yield every numeral of one markdown text that nothing backs."""
    for numeral, offset, span in numerals(text):
        line = first_line + text.count("\n", 0, offset)
        where = f"{place}:{line}" if place.endswith((".py", ".md")) else f"{place}, line {line}"
        if span is None:
            yield Finding(
                where,
                numeral,
                f"{numeral} stands in prose without backticks, so nothing checks it. Print it in a "
                "cell and quote it in backticks, or register it in course_lib/teaching/facts.py.",
            )
        elif not backing.backs(span, numeral):
            yield Finding(
                where,
                numeral,
                f"`{span}`: no cell prints {numeral} now, and it is no registered fact. Quote what "
                "the cells print, character for character.",
            )


def facts() -> tuple[str, ...]:
    """The texts registered in course_lib/teaching/facts.py."""
    from course_lib.teaching.facts import FACTS

    return tuple(FACTS)


def backing_of(notebook: NotebookNode, known: tuple[str, ...]) -> Backing:
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    printed = "\n".join(text for cell in code for text in texts(cell))
    printed = re.sub(r"<[^>]+>", " ", printed)  # numbers of HTML tables, not of their tags
    return Backing(printed, "\n".join(cell.source for cell in code), known)


def first_lines(path: Path) -> dict[str, int]:
    """For each cell id the line of the .py source on which its text begins."""
    source = source_of(path)
    lines = source.read_text(encoding="utf-8").splitlines() if source.exists() else []
    found = {}
    for number, line in enumerate(lines, 1):
        header = re.match(r'# %%.*\bid="([^"]+)"', line)
        if header:
            found[header[1]] = number + 1
    return found


def check_notebook(path: Path, known: tuple[str, ...]) -> list[Finding]:
    """Every unbound or stale number in the prose of one stored notebook."""
    notebook = nbformat.read(path, as_version=4)
    backing, lines = backing_of(notebook, known), first_lines(path)
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for finding in findings(cell.source, backing, "cell " + cell.id):
                in_cell = int(finding.place.rsplit(" ", 1)[1])
                at = (
                    f"{source_of(path)}:{lines[cell.id] + in_cell - 1}"
                    if cell.id in lines
                    else path
                )
                found.append(Finding(f"{at} ({finding.place})", finding.numeral, finding.sentence))
    return found


# Between these marks stands what `make bench` writes; a test holds it equal to its results.
MARKS = "<!-- speed: written by make bench -->", "<!-- end of speed -->"
MEASURED = re.compile(".*?".join(MARKS), re.DOTALL)


def check_readme(path: Path, notebooks: list[Path], known: tuple[str, ...]) -> list[Finding]:
    """The README's numbers come from the notebooks' cells, the facts or the benchmark."""
    printed = [backing_of(nbformat.read(nb, as_version=4), known).printed for nb in notebooks]
    backing = Backing("\n".join(printed), "", known)
    text = path.read_text(encoding="utf-8")
    text = MEASURED.sub(lambda block: "\n" * block[0].count("\n"), text)  # lines keep their numbers
    return list(findings(text, backing, str(path)))


def unused_facts(notebooks: list[Path], readme: Path, known: tuple[str, ...]) -> list[str]:
    """Facts that no prose, code cell or README quotes any more."""
    sources = [nbformat.read(nb, as_version=4) for nb in notebooks]
    text = "\n".join(cell.source for nb in sources for cell in nb.cells)
    text += readme.read_text(encoding="utf-8") if readme.exists() else ""
    return [fact for fact in known if not holds(text, fact)]


def main(names: list[str]) -> int:
    paths = [NOTEBOOKS / f"{Path(name).stem}.ipynb" for name in names] or sorted(
        NOTEBOOKS.glob("*.ipynb")
    )
    known = facts()
    found = [finding for path in paths for finding in check_notebook(path, known)]
    if not names and README.exists():
        found += check_readme(README, paths, known)
    print(*found, sep="\n", end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
