"""The measured rows as tables to read and a figure to show."""

import json
from pathlib import Path

from course_lib.teaching import theme
from tools.prose import MARKS

FOLDER = Path(__file__).resolve().parent
README = FOLDER.parent / "README.md"

# (case, form): the least ratio that is demanded, and the one aimed at
GOALS = {
    ("decode, batch 1, context 32", "fast"): (2.0, 2.5),
    ("decode, batch 1, context 480", "fast"): (2.0, 2.5),
    ("decode, batch 1, context 32", "compiled"): (4.0, 7.0),
    ("decode, batch 1, context 480", "compiled"): (4.0, 7.0),
    ("decode, batch 8, context 32", "fast"): (1.5, 2.0),
    ("decode, batch 8, context 480", "fast"): (1.5, 2.0),
    ("decode, batch 8, context 32", "compiled"): (2.8, 5.0),
    ("decode, batch 8, context 480", "compiled"): (2.4, 5.0),
    ("decode, batch 1, context 8192", "fast"): (3.0, 4.0),
    ("prefill, 128 tokens", "fast"): (1.3, 1.5),
    ("prefill, 512 tokens", "fast"): (1.15, 1.25),
    ("prefill, 128 tokens", "compiled"): (1.6, 2.0),
    ("prefill, 512 tokens", "compiled"): (1.3, 1.6),
    ("training step, 8 x 128 tokens", "grouped"): (1.05, 1.2),
    ("training step, 8 x 128 tokens", "compiled"): (1.35, 1.7),
    ("MoE forward + backward, 128 experts", "grouped"): (2.3, 3.0),
    ("SmolLM2 decode", "compiled"): (1.2, 1.2),
}

HEAD = """# How fast, against what one would use instead

Written by `make bench`. A ratio says how many times faster a form is than the one it is held
against: the median over rounds, with the quartiles behind it. Rounds are interleaved in shuffled
order in one process, one thread, and timed by the CPU clock of the process. transformers runs
its Qwen3-MoE with a shared expert added, on the same weights; the results of all forms were
compared before they were timed ("difference": the largest, to the plain form, as a share of the
largest value where that exceeds 1).

"at most" is the ratio that would remain if a form spent its time only inside matrix products and
attention kernels, which it calls and does not write: ratio / (their share of its time). A goal
above that is out of reach of any code around them on this machine. Reading a weight ahead counts
as time outside, so that forms which do it look as if they had more to gain.

Only steps and prompts are timed: what a compiled form copies when a generation starts is not.

plain: the modules of `course_lib/model` as they are read. fast: `course_lib/serving/fast.py`, the
default of `generate`. compiled: `compile_decode` and `compile_forward`. grouped:
`Router(form="grouped")`.
"""


def ratio_table(rows: list[dict]) -> str:
    lines = [
        "| case | form | against | ratio | quartiles | goal: least / aim | at most | ms | "
        "difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in (row for row in rows if "median" in row):
        goal = GOALS.get((row["case"], row["form"]))
        goals = "" if goal is None else f"{goal[0]:g} / {goal[1]:g}"
        difference = row["difference"]
        shown = "" if not difference else f"{difference:.0e}"
        lines.append(
            f"| {row['case']} | {row['form']} | {row['against']} | **{row['median']:.2f}** | "
            f"{row['q1']:.2f}..{row['q3']:.2f} | {goals} | {at_most(row)} | {row['ms']:.3g} | "
            f"{shown} |"
        )
    return "\n".join(lines)


def at_most(row: dict) -> str:
    return f"{row['median'] / row['kernels']:.2f}" if row.get("kernels") else ""


def summary(rows: list[dict]) -> str:
    """What the README says of speed: the goals' rows, and how decoding grows."""
    cells = {(row["case"], row["form"]): row for row in rows if "median" in row}
    lines = [
        "| | form | times as fast | quartiles |",
        "|---|---|---|---|",
    ]
    for case, form in GOALS:
        row = cells[case, form]
        against = "" if row["against"] == "transformers" else f", against the {row['against']}"
        quartiles = f"{row['q1']:.2f} to {row['q3']:.2f}"
        lines.append(f"| {case}{against} | {form} | **{row['median']:.2f}** | {quartiles} |")
    growth = [row for row in rows if row["case"] == "growth"]
    first, last = growth[0], growth[-1]
    lines.append(
        f"\nFrom {first['context']} to {last['context']} tokens of context a decoded token takes "
        f"{last['ms'] / first['ms']:.1f} times as long, while the cache that it reads grows "
        f"{last['context'] // first['context']} times, to {last['cache_bytes'] / 2**20:.0f} MiB."
    )
    return "\n".join(lines)


def with_summary(text: str, rows: list[dict]) -> str:
    """The README `text` with the summary of `rows` between the marks."""
    head, rest = text.split(MARKS[0])
    return f"{head}{MARKS[0]}\n\n{summary(rows)}\n\n{MARKS[1]}{rest.split(MARKS[1])[1]}"


def compile_table(rows: list[dict]) -> str:
    lines = ["| case | compiling, seconds | paid back after steps |", "|---|---|---|"]
    for row in (row for row in rows if "compile_seconds" in row):
        steps = row["pays_after_steps"]
        shown = "never" if steps is None else f"{steps:,.0f}"
        lines.append(f"| {row['case']} | {row['compile_seconds']:.0f} | {shown} |")
    return "\n".join(lines)


def growth_table(rows: list[dict]) -> str:
    growth = [row for row in rows if row["case"] == "growth"]
    lines = ["| context | ms a token | MiB of cache read a token |", "|---|---|---|"]
    for row in growth:
        mib = row["cache_bytes"] / 2**20
        lines.append(f"| {row['context']} | {row['ms']:.2f} | {mib:.2f} |")
    times = growth[-1]["ms"] / growth[0]["ms"]
    lines.append(f"\nFrom {growth[0]['context']} to {growth[-1]['context']}: {times:.2f} times.")
    return "\n".join(lines)


def course_tables(rows: list[dict]) -> str:
    """What a reader waits for: explorables (CPU clock of the kernel), notebooks (wall)."""
    lines = ["| explorable | median ms | p95 ms |", "|---|---|---|"]
    for row in (row for row in rows if row["case"] == "explorable"):
        lines.append(f"| {row['form']} | {row['median_ms']:.1f} | {row['p95_ms']:.1f} |")
    lines += ["\n| notebook, two at a time | seconds |", "|---|---|"]
    for row in (row for row in rows if row["case"] in ("notebook", "all notebooks")):
        lines.append(f"| {row.get('form', 'all')} | {row['seconds']:.0f} |")
    first = next(row for row in rows if row["case"] == "first cell")
    lines.insert(0, "Explorables are moved at random, new sentences through SmolLM2 included.\n")
    lines.append(f"\nA kernel has run its first cell, the imports, after {first['seconds']:.1f} s.")
    return "\n".join(lines)


def against_llama(rows: list[dict]) -> str:
    """SmolLM2 here against llama.cpp, and what their bytes explain of it."""
    by_form = {row["form"]: row for row in rows if row["case"] == "SmolLM2 decode"}
    own, other = by_form["compiled"], by_form["llama.cpp Q4_1"]
    return (
        f"- SmolLM2, llama.cpp on the Q4_1 file: {own['ms'] / other['ms']:.1f} times as fast as "
        f"the compiled form on the same weights in float32; it reads "
        f"1/{own['bytes_read'] / other['bytes_read']:.1f} of the bytes."
    )


def other_lines(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        if row["case"].startswith("attention memory"):
            mib = row["mib"]
            lines.append(
                f"- {row['case']}: {mib['sdpa']:.1f} MiB against {mib['explicit']:.0f} MiB of "
                f"explicit scores, 1/{1 / row['share']:.0f}."
            )
        elif row["case"] == "import":
            lines.append(
                f"- import torch {row['torch_s']:.2f} s, course_lib behind it "
                f"{row['course_lib_s']:.3f} s of wall time."
            )
        elif row["case"] == "SmolLM2 decode" and row["form"] != "plain":
            least = row["bytes_read"] / row["read_bandwidth_gb_s"] / 1e6
            lines.append(
                f"- SmolLM2, {row['form']}: {row['bytes_read'] / 1e6:.0f} MB read a token; at "
                f"the {row['read_bandwidth_gb_s']:.1f} GB/s of one thread that alone takes "
                f"{least:.0f} ms, of the {row['ms']:.0f} ms measured."
            )
    return "\n".join([*lines, against_llama(rows)])


def draw_growth(rows: list[dict]):
    growth = [row for row in rows if row["case"] == "growth"]
    contexts = [row["context"] for row in growth]
    fig, (left, right) = theme.figure(9.6, 3.8, ncols=2)
    left.plot(contexts, [row["ms"] for row in growth], "o-", color=theme.role_colour("q"))
    left.set(title="Time of one decoded token", xlabel="tokens of context", ylabel="ms")
    mib = [row["cache_bytes"] / 2**20 for row in growth]
    right.plot(contexts, mib, "o-", color=theme.role_colour("cache"))
    right.set(title="Cache read for it", xlabel="tokens of context", ylabel="MiB")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [str(c) for c in contexts])
        axes.set_ylim(bottom=0)
    theme.save(fig, "decode_growth")


def write(rows: list[dict], notes: list[str]):
    (FOLDER / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    parts = [
        HEAD,
        ratio_table(rows),
        "\n## Compiling\n",
        compile_table(rows),
        "\n## Growth of decoding, fast form, batch 1\n",
        growth_table(rows),
        "\n## The course\n",
        course_tables(rows),
        "\n## Other figures\n",
        other_lines(rows),
        "\n## Notes\n",
        "\n".join(f"- {note}" for note in notes),
    ]
    (FOLDER / "RESULTS.md").write_text("\n".join(parts) + "\n", encoding="utf-8")
    README.write_text(with_summary(README.read_text(encoding="utf-8"), rows), encoding="utf-8")
    draw_growth(rows)
