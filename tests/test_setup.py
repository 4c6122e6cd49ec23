"""The set-up: one list of pins in three files, a Makefile that explains itself, line lengths."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
INSTALLED_EXTRAS = ("test", "browser")
PIN = re.compile(r"[a-z0-9][a-z0-9-]*==[0-9][0-9a-z.]*")


def pyproject_pins(extras=INSTALLED_EXTRAS):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][e] for e in extras)]
    return [pin for pins in lists for pin in pins]


def environment_list():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    return environment, environment["dependencies"][-1]["pip"]


def environment_pins():
    return [line for line in environment_list()[1] if not line.startswith("-")]


def differences(pins, other, name):
    return [
        *(f"pyproject.toml pins {pin}, and {name} does not." for pin in pins if pin not in other),
        *(f"{name} pins {pin}, and pyproject.toml does not." for pin in other if pin not in pins),
    ]


def test_environment_has_the_pins_of_pyproject():
    assert differences(pyproject_pins(), environment_pins(), "environment.yml") == []


def test_a_changed_pin_is_named():
    changed = [pin.replace("numpy==2.4.6", "numpy==2.4.5") for pin in environment_pins()]
    assert differences(pyproject_pins(), changed, "environment.yml") == [
        "pyproject.toml pins numpy==2.4.6, and environment.yml does not.",
        "environment.yml pins numpy==2.4.5, and pyproject.toml does not.",
    ]


def test_the_lock_has_the_pins_of_pyproject():
    lock = (ROOT / ".ci/constraints.txt").read_text(encoding="utf-8").splitlines()
    missing = [pin for pin in pyproject_pins() if pin not in lock]
    assert missing == [], "Run: make lock"


@pytest.mark.parametrize("pin", pyproject_pins(("test", "browser", "bench", "bench-litgpt")))
def test_every_pin_is_exact(pin):
    assert PIN.fullmatch(pin), f"{pin} is not NAME==VERSION."


def test_environment_asks_conda_for_python_pip_and_make_only():
    environment, pip_list = environment_list()
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    assert environment["dependencies"][:-1] == ["python=3.11", "pip", "make"]
    assert pip_list[-1] == "-e .", "The last entry installs course_lib itself: - -e ."


@pytest.mark.parametrize("name", ["pyproject.toml", "environment.yml", ".ci/constraints.txt"])
def test_no_requirement_names_an_extra_index(name):
    assert "index-url" not in (ROOT / name).read_text(encoding="utf-8"), (
        "pip asks it for every single package."
    )


def test_make_help_lists_every_target_for_people():
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = re.findall(r"^make (\w+) +\S.*$", shown.stdout, re.MULTILINE)
    phony = re.search(
        r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )[1].split()
    assert sorted(listed) == sorted(set(phony) - {"model", "peers", "torch"})
    assert {"lab", "test", "refresh", "check", "clean"} <= set(listed)


def test_an_old_python_is_refused_with_a_sentence(tmp_path):
    old = tmp_path / "python"
    pretend = "import sys; sys.version_info = (3, 10); exec(sys.argv[1])"
    old.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{pretend}' \"$2\"\n", encoding="utf-8")
    old.chmod(0o755)
    command = ["make", "lab", f"PYTHON={old}", f"VENV={tmp_path}/venv"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode != 0
    assert "Python 3.11 to 3.14 is needed" in run.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("name", "columns", "accepted"),
    [
        ("course_lib/model/x.py", 88, True),
        ("course_lib/model/x.py", 89, False),
        ("course_lib/x.py", 100, True),
        ("course_lib/x.py", 101, False),
    ],
)
def test_line_length(name, columns, accepted):
    command = [sys.executable, "-m", "ruff", "check", "--stdin-filename", name, "-"]
    line = f'x = "{"y" * (columns - 6)}"\n'
    run = subprocess.run(command, cwd=ROOT, input=line, capture_output=True, text=True)
    assert ("E501" not in run.stdout) == accepted, run.stdout


def test_ci_run_is_an_executable_bash_script():
    assert os.access(ROOT / ".ci/run", os.X_OK)
    subprocess.run(["bash", "-n", ROOT / ".ci/run"], check=True)
