"""Static figures show the data they are given: bars of those heights, cells of those numbers."""

import numpy as np
import pytest
import torch

from course_lib import Config, ModernDecoder
from course_lib.teaching import figures, theme
from course_lib.trace import trace


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_silhouette_has_a_bar_of_its_size_for_each_tensor():
    torch.manual_seed(0)
    model = ModernDecoder(Config(n_layers=2, d_model=64))
    run = trace(model, torch.randint(1000, (2, 5)), flops=False)
    _, ax = theme.figure()
    figures.draw_silhouette(run, ax)
    heights = [bar.get_height() for bar in ax.containers[0]]
    stages = [s for s in run if not s.name.endswith(("ids", "ffn.weights", "chosen"))]
    assert heights == [stage.value.numel() / 10 for stage in stages]
    assert heights[0] == 64 and heights[-1] == 1000


def test_usage_bars_carry_their_counts():
    _, ax = theme.figure()
    figures.draw_usage([6, 0, 3], ax, "router", even=3)
    assert [bar.get_height() for bar in ax.containers[0]] == [6, 0, 3]
    assert texts(ax) == ["6", "0", "3"]
    assert ax.lines[0].get_ydata()[0] == 3


def test_position_errors_leave_equal_positions_empty():
    _, ax = theme.figure()
    figures.draw_position_errors({"a": [0.0, 1.5], "b": [1e-7, 0.25]}, ax, boundary=1)
    assert texts(ax) == ["1.50", "0.25"]
    assert np.allclose(ax.images[0].get_array(), [[0.0, 1.5], [1e-7, 0.25]])
    assert ax.lines[0].get_xdata()[0] == 0.5


def test_mask_hatches_what_is_not_seen():
    allowed = torch.ones(2, 5).tril(3).bool()
    _, ax = theme.figure()
    figures.draw_mask(allowed, ax)
    hatched = [patch.get_hatch() is not None for patch in ax.patches]
    assert hatched == (~allowed).flatten().tolist()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["3", "4"]


def test_attention_hides_the_future():
    weights = torch.eye(3)
    _, ax = theme.figure()
    figures.draw_attention(weights, ["a", "b", "c"], ax)
    shown = ax.images[0].get_array()
    assert np.array_equal(shown.mask, np.triu(np.ones((3, 3), bool), 1))
    assert ax.images[0].get_clim() == (0, 1)


def test_losses_start_at_zero_and_show_the_floor():
    _, ax = theme.figure()
    figures.draw_losses({"leak": [2.0, 0.1], "honest": [2.0, 2.1]}, ax, 2.0, "ln V")
    assert [list(line.get_ydata()) for line in ax.lines[:2]] == [[2.0, 0.1], [2.0, 2.1]]
    assert ax.lines[2].get_ydata()[0] == 2.0 and ax.get_ylim()[0] == 0


def test_parameters_are_shares_of_the_first_row():
    parts = {"embedding": 1, "attention": 2, "dense feed-forward": 1, "shared experts": 2,
             "routed experts": 4}  # fmt: skip
    _, ax = theme.figure()
    figures.draw_parameters({"total": parts, "active": parts | {"routed experts": 1}}, ax)
    widths = [bar.get_width() for bars in ax.containers for bar in bars]
    assert widths == pytest.approx([0.1, 0.2, 0.1, 0.2, 0.4, 0.1, 0.2, 0.1, 0.2, 0.1])
    assert {"10", "7"} < set(texts(ax))


def test_bytes_are_written_on_their_bars():
    _, ax = theme.figure()
    figures.draw_bytes({"GQA": 1024, "MLA": 640}, ax)
    assert [bar.get_width() for bar in ax.containers[0]] == [1024, 640]
    assert texts(ax) == ["1,024 bytes", "640 bytes"]
