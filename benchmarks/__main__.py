"""`python -m benchmarks [section ...]`: measure, compare, write RESULTS.md and results.json."""

import argparse
import json
import os
import platform
import subprocess
import tempfile
import time
import warnings
from pathlib import Path

import torch

from benchmarks import course, report, sections, trained

ROOT = Path(__file__).resolve().parents[1]
LITGPT = ROOT / ".venv-bench-litgpt" / "bin" / "python"

SECTIONS = {
    "decode": sections.decode,
    "long": sections.long_decode,
    "growth": sections.growth,
    "prefill": sections.prefill,
    "training": sections.training,
    "experts": sections.experts,
    "generate": sections.whole_call,
    "memory": sections.attention_memory,
    "imports": sections.imports,
    "smollm2": trained.smollm2_decode,
    "explorables": course.explorables,
    "course": course.course,
}


def say(line: str):
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)


def processor() -> str:
    """Its name, where the system tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    parts = [line.split(":")[1].strip() for line in lines[:12] if line[:5] in ("model", "cpu f")]
    return ", ".join(parts) or platform.processor() or "unknown processor"


def litgpt_rows(rounds: int) -> tuple[list[dict], str]:
    """litgpt cannot share an environment with transformers 5, so it has a process of its own."""
    if not LITGPT.exists():
        return [], "litgpt was not measured: `make bench-litgpt` sets up its environment."
    command = [str(LITGPT), "-W", "ignore", "-m", "benchmarks.litgpt_peer", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    rows = json.loads(done.stdout.strip().splitlines()[-1])
    return rows, "litgpt runs in a process of its own, so it is held against the plain form."


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", nargs="*", help=f"of {', '.join([*SECTIONS, 'litgpt'])}")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    chosen = given.section or [*SECTIONS, "litgpt"]
    warnings.simplefilter("ignore")  # peers and the compiler call what torch has deprecated
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "KINETO_LOG_LEVEL": "9"}
    # what an earlier run compiled would make compiling look cheap
    kept = tempfile.TemporaryDirectory()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = kept.name
    os.environ["PYTHONPATH"] = str(ROOT)  # for the kernels of the notebooks
    torch.set_num_threads(1)
    rows, notes, start = [], [], time.perf_counter()
    for name in chosen:
        say(name)
        if name == "litgpt":
            found, note = litgpt_rows(given.rounds)
            notes.append(note)
        else:
            found = SECTIONS[name](say, given.rounds)
        rows += found
        for row in (row for row in found if "median" in row):
            ratio = f"{row['median']:.2f} [{row['q1']:.2f}..{row['q3']:.2f}]"
            say(f"  {row['case']}: {row['form']} {ratio} x {row['against']}, {row['ms']:.3g} ms")
    load = os.getloadavg()[2]
    notes.append(f"{processor()}, {platform.machine()}, torch {torch.__version__}.")
    notes.append(f"Took {time.perf_counter() - start:.0f} s; load average meanwhile {load:.1f}.")
    if not given.section:
        report.write(rows, notes)
        say("wrote RESULTS.md, results.json, figures/decode_growth.* and the table of the README")


if __name__ == "__main__":
    main()
