"""How long a reader waits: explorables, the start of a notebook, whole notebooks."""

import json
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nbformat import v4

from course_lib.teaching.explorables import EXPLORABLES
from tools import notebooks
from tools.execute import execute

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
STATES = 30
FIRST_CELL = "import torch\ntorch.set_num_threads(1)\nfrom course_lib import ModernDecoder"


def explorables(report, rounds: int) -> list[dict]:
    """CPU milliseconds from a change of one control to a message for the browser."""
    found = []
    for name, make in EXPLORABLES.items():
        spent = moves(make())
        p95 = statistics.quantiles(spent, n=20)[-1]
        report(f"  {name}: median {statistics.median(spent):.1f} ms, p95 {p95:.1f} ms")
        row = {"case": "explorable", "form": name, "median_ms": statistics.median(spent)}
        found.append(row | {"p95_ms": p95})
    return found


def moves(explorable) -> list[float]:
    """Time of changing one control at a time to random values, as a reader does."""
    rng, names = random.Random(0), list(explorable.declared)
    spent = []
    for count in range(STATES + 5):
        name = names[count % len(names)]
        spent.append(milliseconds(explorable, {name: explorable.declared[name].sample(rng)}))
    return spent[5:]  # the first ones import and draw weights


def milliseconds(explorable, state: dict) -> float:
    """CPU time from the change of state to a message ready to be sent."""
    begin = time.process_time()
    explorable.set(**state)
    json.dumps(explorable.canvas.picture.get("rows"))
    return 1000 * (time.process_time() - begin)


def course(report, rounds: int) -> list[dict]:
    """Wall seconds: a kernel until its first cell has run, each notebook, all two at a time."""
    found = []
    for _ in range(3):
        start = time.perf_counter()
        execute(v4.new_notebook(cells=[v4.new_code_cell(FIRST_CELL)]), FOLDER)
        found.append(time.perf_counter() - start)
    rows = [{"case": "first cell", "seconds": statistics.median(found)}]
    start = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        runs = list(zip(names := paths(), pool.map(notebooks.run, names), strict=True))
    whole = time.perf_counter() - start
    for path, (_, error, seconds) in runs:
        assert not error, error
        rows.append({"case": "notebook", "form": path.stem, "seconds": seconds})
    return [*rows, {"case": "all notebooks", "seconds": whole}]


def paths() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb"))
