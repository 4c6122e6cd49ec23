"""`python -m course_lib`: exits 0 with the numbers of this run, or names what failed."""

import subprocess
import sys

import pytest
import torch

import course_lib.__main__ as report
from tests.helpers import small

SHOWN = """
total 3,967,488
routed experts 2,359,296 (59.5%)
shared experts 294,912
active per token 2,198,016 (55.4%)
cross-entropy, random targets 6.8354 nats
ln(vocab_size) 6.9078
balance loss, all MoE layers 0.0683
gradient norm of their sum 8.833
cross-entropy, next token 7.0146 nats
the same without our init 228.1 nats
prompt [[622, 385, 882, 130, 167]]
prompt and continuation (1, 15)
block 1, in the forward pass [1, 6, 0, 0, 0, 2, 1, 2]
block 2, in the forward pass [4, 2, 0, 0, 0, 0, 0, 6]
block 3, in the forward pass [2, 0, 3, 0, 0, 5, 0, 2]
block 1, fed the embeddings [6, 1, 0, 2, 0, 0, 0, 3]
chunks [3, 2, 3] < 1e-05 at every position: True
chunks [7, 1] < 1e-05 at every position: True
scores (1, 8, 6, 6)
K expanded, not cached (1, 8, 6, 32)
final logits (1, 6, 1000)
"""


def test_the_report_runs_alone_and_shows_the_numbers():
    run = subprocess.run(
        [sys.executable, "-m", "course_lib"], capture_output=True, text=True, encoding="utf-8"
    )
    assert run.returncode == 0 and run.stderr == ""
    text = " ".join(run.stdout.split())
    assert [line for line in SHOWN.strip().splitlines() if line not in text] == []
    assert run.stdout.rstrip().endswith("all checks passed")


@pytest.fixture(autouse=True)
def keep_the_global_generator():
    with torch.random.fork_rng():
        yield


@pytest.mark.parametrize("change", [{}, dict(n_experts=0), dict(first_k_dense=0)])
def test_any_config_has_a_report(change, capsys):
    assert report.main(small(**change)) == 0
    assert capsys.readouterr().out.endswith("\nall checks passed\n")


def test_a_failed_check_is_named_and_exits_1(monkeypatch, capsys):
    monkeypatch.setattr(report, "CACHE_TOLERANCE", 0.0)
    monkeypatch.setattr(report, "numel", lambda model: 1)
    assert report.main(small()) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("FAILED: counted parameters = built parameters; cached = uncached for")
    assert "[3, 2, 3]" in last


BROKEN = {
    "the first loss is near ln V": (
        "losses",
        lambda *a, **k: (torch.ones((), requires_grad=True),) * 2,
    ),
    "block 1 fills 12 slots": ("expert_usage", lambda chosen, n: [0] * n),
    "cached = uncached for chunks [8]": ("cached_logits", lambda *args: torch.zeros(())),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_kind_of_check_can_fail(name, monkeypatch, capsys):
    monkeypatch.setattr(report, *BROKEN[name])
    assert report.main(small()) == 1
    assert name in capsys.readouterr().out.splitlines()[-1]
