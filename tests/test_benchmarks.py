"""The benchmark's arithmetic, its equality check and its goals; no peer is needed here."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import report
from benchmarks.contenders import (
    Fast,
    Readable,
    check_equal,
    course_model,
    decoding,
    prefilling,
    token_ids,
)
from benchmarks.rounds import Contender, interleave, kernel_share, ratios

SMALL = dict(vocab_size=53, d_model=32, n_layers=2, d_ff=48, d_expert=16, max_seq_len=32)
RESULTS = Path(report.FOLDER) / "results.json"


def test_a_ratio_is_taken_inside_a_round():
    # a round in which the machine was ten times slower changes no ratio
    seconds = {"peer": [2.0, 20.0, 2.0, 2.0], "own": [1.0, 10.0, 1.0, 1.0]}
    assert ratios(seconds, "peer", "own") == {"q1": 2.0, "median": 2.0, "q3": 2.0, "rounds": 4}


def test_rounds_run_everyone_once_in_changing_order():
    calls = []
    names = {n: Contender(lambda: None, lambda _, n=n: calls.append(n)) for n in "abc"}
    seconds = interleave(names, rounds=8, warm=1)
    by_round = [tuple(calls[i : i + 3]) for i in range(0, 27, 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in by_round)
    assert len(set(by_round)) > 1
    assert [len(spent) for spent in seconds.values()] == [8, 8, 8]


def test_the_share_of_kernels_tells_products_from_what_surrounds_them():
    x, small = torch.randn(512, 512), torch.randn(4)
    products = kernel_share(Contender(lambda: x, lambda x: [x @ x for _ in range(4)]))
    sums = kernel_share(Contender(lambda: small, lambda x: [x + x for _ in range(9)]))
    assert products > 0.8 and sums == 0


def test_the_forms_are_compared_and_a_wrong_one_is_refused():
    model = course_model(**SMALL)
    ids = token_ids(model, 2, 12)
    forms = {"plain": Readable(model), "fast": Fast(model)}
    for made in (lambda form: decoding(form, ids, 8), lambda form: prefilling(form, ids)):
        contenders = {name: made(form) for name, form in forms.items()}
        assert max(check_equal(contenders, "plain").values()) < 1e-5
        other = Fast(course_model(**SMALL | {"rope_theta": 500.0}))
        with pytest.raises(AssertionError, match="fast differs"):
            check_equal(contenders | {"fast": made(other)}, "plain")


def test_decoding_again_forgets_what_it_decoded_before():
    model = course_model(**SMALL)
    ids = token_ids(model, 1, 12)
    for form in (Readable(model), Fast(model)):
        contender = decoding(form, ids, 8)
        first, second = (contender.run(contender.prepare()) for _ in range(2))
        assert torch.equal(first, second)


@pytest.mark.skipif(not RESULTS.exists(), reason="make bench has not run")
def test_every_goal_was_measured_and_every_result_compared():
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    measured = {(row["case"], row["form"]) for row in rows if "median" in row}
    assert set(report.GOALS) <= measured
    compared = [row["difference"] for row in rows if row.get("difference") is not None]
    assert compared and max(compared) <= 1e-3
    own = [r for r in rows if r.get("form") in ("fast", "compiled", "grouped") and "median" in r]
    assert all(r["difference"] <= 1e-5 for r in own if r["difference"] is not None)


@pytest.mark.skipif(not RESULTS.exists(), reason="make bench has not run")
def test_the_readme_shows_what_was_measured():
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    text = report.README.read_text(encoding="utf-8")
    assert report.with_summary(text, rows) == text
    changed = [row | {"median": row["median"] + 0.01} if "median" in row else row for row in rows]
    assert report.with_summary(text, changed) != text
