"""One notebook on the wall: JupyterLab in presentation mode, code hidden, all widgets live.

python -m tools.present [NB] [OPTION...]      options go to jupyter lab
"""

import os
import sys
from pathlib import Path

EXTENSIONS = Path(__file__).resolve().parent / "labextension"
NOTEBOOKS = Path("notebooks")
FIRST = "16_end_to_end"


def options(notebook: str) -> list[str]:
    """What `jupyter lab` is told; raises ValueError for a notebook that is not there."""
    path = NOTEBOOKS / f"{Path(notebook).stem}.ipynb"
    if not path.exists():
        there = ", ".join(sorted(p.stem for p in NOTEBOOKS.glob("*.ipynb")))
        raise ValueError(f"There is no {path}. Choose NB from: {there}.")
    root = ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    return [
        *root,
        f"--LabApp.default_url=/lab/tree/{path.as_posix()}?reset",
        f"--LabApp.extra_labextensions_path={EXTENSIONS}",
    ]


def main(arguments: list[str]) -> int:
    names = [argument for argument in arguments if not argument.startswith("-")]
    passed_on = [argument for argument in arguments if argument.startswith("-")]
    try:
        chosen = options(names[0] if names else FIRST)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "jupyter", "lab", *chosen, *passed_on]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
