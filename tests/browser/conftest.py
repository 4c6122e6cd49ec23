"""A real browser, and the course in JupyterLab; skipped with a reason where there is none."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.browser import find_chromium, lab_server

ROOT = Path(__file__).resolve().parents[2]
SHOTS = ROOT / "build" / "screenshots"


def pytest_collection_modifyitems(items):
    """Without a browser skip, unless COURSE_BROWSER=required: then let the tests fail."""
    if find_chromium() or os.environ.get("COURSE_BROWSER") == "required":
        return
    reason = "no Chromium found: install one, or name it in COURSE_CHROMIUM"
    for item in items:
        if Path(__file__).parent in Path(item.path).parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def shots() -> Path:
    SHOTS.mkdir(parents=True, exist_ok=True)
    return SHOTS


@pytest.fixture(scope="session")
def lab(tmp_path_factory) -> Iterator[tuple[str, Path]]:
    """One JupyterLab for the tests of a worker: its address, and the folder that it serves."""
    folder = tmp_path_factory.mktemp("lab")
    with lab_server(folder) as address:
        yield address, folder
