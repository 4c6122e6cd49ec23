"""Load the notebook plugin, for tests/ and notebooks/ alike, and share the work out evenly."""

from pathlib import Path

import pytest

pytest_plugins = ["tools.nbval_strict"]

ROOT = Path(__file__).resolve().parent
# Folders whose files run for minutes: their tests go to whichever worker is free.
SPREAD = (ROOT / "tests" / "browser", ROOT / "tests" / "teaching")


def pytest_collection_modifyitems(items):
    """The cells of a notebook share a kernel, the tests of a file its fixtures: one worker each."""
    for item in items:
        path = Path(item.path)
        if path.suffix == ".ipynb" or not any(folder in path.parents for folder in SPREAD):
            item.add_marker(pytest.mark.xdist_group(path.as_posix()))
