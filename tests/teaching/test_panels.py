"""Panels: what they refuse, how they travel, and that both renderers show their values."""

import json

import numpy as np
import pytest
import torch

from course_lib.teaching import agg, wire
from course_lib.teaching.panels import (
    Bars,
    Heat,
    Lines,
    Note,
    Picture,
    compact,
    row_heights,
    rows_of,
)
from course_lib.teaching.theme import ROLE

RNG = np.random.default_rng(0)
CAUSAL = np.triu(np.ones((5, 5), bool), 1)
PANELS = {
    "heat": Heat(RNG.random((3, 5)), title="t", xticks=list("abcde"), limits=(0, 1), mark=(1, 2)),
    "masked": Heat(RNG.random((5, 5)), hidden=CAUSAL, pick={"x": "token"}, fmt="{:.2f}"),
    "tiles": Heat(RNG.random((6, 5, 5)), hidden=CAUSAL, names=list("uvwxyz"), mark_tile=2),
    "signed": Heat(RNG.standard_normal((2, 2)), scale="diverging"),
    "bars": Bars([3, 0, 5], "abc", reference=2.5, reference_label="even", mark=1),
    "missing": Bars([np.nan, 2, 5], "abc", missing="none"),
    "nothing": Bars([[np.nan], [1]], "a", names=["met", "rest"], missing="none"),
    "negative": Bars([-3.5, 2.0], ["left", "right"], fmt="{:.1f}"),
    "stacked": Bars(RNG.random((2, 4)), range(4), names=["met", "rest"], roles=["q", "k"]),
    "lines": Lines(range(1, 9), {"a": RNG.random(8), "b": RNG.random(8)}, marks={"here": 3}),
    "logs": Lines([1, 10, 100], {"a": [1, np.nan, 1e6]}, xlog=True, ylog=True, dots=True),
    "dense": Lines(range(3000), {"a": np.cos(np.arange(3000))}),
    "note": Note("q (1, 2)\nk (1, 2)", title="shapes"),
    "picture": Picture("<svg xmlns='http://www.w3.org/2000/svg'/>"),
}
every_panel = pytest.mark.parametrize("panel", PANELS.values(), ids=PANELS)


@every_panel
def test_a_panel_comes_back_from_its_bytes(panel):
    message = wire.encode([[panel, PANELS["bars"]], [panel]])
    json.dumps(message["rows"])
    assert isinstance(message["data"], bytes)
    rows = wire.decode(message)
    assert [len(row) for row in rows] == [2, 1]
    assert all(wire.same(got, panel) for got in (rows[0][0], rows[1][0]))
    assert wire.same(rows[0][1], PANELS["bars"])


def test_arrays_start_where_the_browser_can_read_them():
    odd = Heat(RNG.random((3, 3)), hidden=np.zeros((3, 3), bool))
    message = wire.encode([[odd, PANELS["lines"], PANELS["bars"]]])

    def references(value):
        if isinstance(value, dict) and "at" in value:
            return [value]
        inner = value.values() if isinstance(value, dict) else value
        return (
            [r for item in inner for r in references(item)]
            if hasattr(inner, "__iter__") and not isinstance(inner, str)
            else []
        )

    found = references(message["rows"])
    assert len(found) == 6
    assert all(reference["at"] % 8 == 0 for reference in found)


def test_same_sees_every_difference():
    heat = PANELS["heat"]
    values = heat.values.copy()
    values[0, 0] += 1e-6
    assert not wire.same(
        heat, Heat(values, title="t", xticks=list("abcde"), limits=(0, 1), mark=(1, 2))
    )
    assert not wire.same(PANELS["note"], Note("q", title="shapes"))
    assert not wire.same(heat, PANELS["bars"])
    assert not wire.same(Bars([1], "a"), Bars([1], "a", mark=0))


def test_tensors_and_lists_become_arrays():
    heat = Heat(torch.tensor([[0.5, 0.25]], requires_grad=True))
    assert heat.values.dtype == np.float32 and heat.values.tolist() == [[0.5, 0.25]]
    assert Bars(torch.tensor([1, 2]), "ab").values.tolist() == [1, 2]


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Heat([1, 2]),
        lambda: Heat(np.zeros((0, 2))),
        lambda: Heat([[np.nan]]),
        lambda: Heat([[1.0]], scale="rainbow"),
        lambda: Heat([[1.0, 2.0]], xticks=["a"]),
        lambda: Heat(np.zeros((2, 1, 1)), names=["a"]),
        lambda: Bars([1, 2], ["a"]),
        lambda: Bars([[1, 2]], "ab"),
        lambda: Bars([np.inf], "a"),
        lambda: Bars([np.nan], "a"),
        lambda: Bars([np.inf], "a", missing="none"),
        lambda: Bars([1, 2], "ab", roles=["q"]),
        lambda: Lines([1, 2], {}),
        lambda: Lines([1, 2], {"a": [1, 2, 3]}),
        lambda: rows_of([]),
        lambda: rows_of([[Note("a"), "b"]]),
    ],
)
def test_a_panel_that_does_not_fit_together_is_an_error_of_its_view(bad):
    with pytest.raises(TypeError):
        bad()


def test_a_masked_cell_needs_no_number():
    heat = Heat([[1.0, -np.inf]], hidden=[[False, True]])
    assert heat.limits == (0.0, 1.0)


def test_limits_are_zero_to_the_largest_or_symmetric():
    assert Heat([[0.5, 2.0]]).limits == (0.0, 2.0)
    assert Heat([[0.5, -2.0]], scale="diverging").limits == (-2.0, 2.0)
    assert Heat([[0.0]]).limits == (0.0, 1.0)


def test_rows_share_the_height_and_text_takes_its_lines():
    note, bars = Note("a\nb\nc"), PANELS["bars"]
    assert row_heights([[bars], [bars]], 400) == [200, 200]
    assert row_heights([[note], [bars]], 400) == [68, 332]
    assert row_heights([[Note("a\nb\nc", title="t")], [bars]], 400) == [94, 306]
    tall = Bars([1], "a", height=3)
    assert row_heights([[bars, tall], [bars]], 400) == [300, 110]
    assert min(row_heights([[bars]] * 9, 400)) == 110


def test_compact_numbers():
    assert [compact(v) for v in (0, 0.25, 999, 1500, 3967488, 2e9)] == [
        "0",
        "0.25",
        "999",
        "1.5k",
        "3.97M",
        "2G",
    ]


# -- the stored picture ---------------------------------------------------------------------------


def axes_of(panel):
    return agg.draw([[panel]], 600, 300).axes


@every_panel
def test_the_stored_picture_is_the_same_bytes_again(panel):
    assert agg.png([[panel]], 600, 300) == agg.png([[panel]], 600, 300)


@every_panel
def test_no_text_leaves_the_picture_and_none_is_small(panel):
    fig = agg.draw([[panel]], 960, 400)
    fig.canvas.draw()
    drawn, (width, height) = fig.get_tightbbox(), fig.get_size_inches()
    assert drawn.x0 >= -0.01 and drawn.x1 <= width + 0.01, drawn
    assert drawn.y0 >= -0.01 and drawn.y1 <= height + 0.01, drawn
    texts = fig.findobj(lambda artist: hasattr(artist, "get_fontsize"))
    assert min(text.get_fontsize() for text in texts) >= 9


def test_what_is_missing_is_said_and_has_no_bar():
    for name, said in (("missing", ["none", "2", "5"]), ("nothing", ["none"])):
        assert wire.texts_of(PANELS[name]) == said
        (ax,) = axes_of(PANELS[name])
        assert [text.get_text() for text in ax.texts] == said
        assert ax.texts[0].get_position()[1] == 0


def test_a_curve_of_more_points_than_pixels_is_a_band_round_it():
    panel = PANELS["dense"]
    (ax,) = axes_of(panel)
    (band,) = ax.collections
    low, high = (line.get_ydata() for line in ax.lines)
    assert len(low) < 600 / 2 and band.get_alpha() < 0.5
    assert (low.min(), high.max()) == (panel.curves["a"].min(), panel.curves["a"].max())
    assert (high - low).min() > 1.8, "each column holds more than a turn"
    smooth = Lines(range(3000), {"a": np.linspace(0, 1, 3000)})
    low, high = (line.get_ydata() for line in axes_of(smooth)[0].lines)
    assert (high - low).max() < 0.02
    few = Lines(range(100), {"a": np.cos(np.arange(100))})
    gaps = Lines(range(3000), {"a": np.where(np.arange(3000) % 2, 1, np.nan)})
    assert not axes_of(few)[0].collections and not axes_of(gaps)[0].collections


def test_low_rows_are_all_named():
    names = [f"block {i}" for i in range(14)]
    panel = Heat(np.zeros((14, 20)), yticks=names, square=False)
    for height, named in ((300, 14), (240, 14), (160, 7)):
        ax = agg.draw([[panel]], 600, height).axes[0]
        assert len(ax.get_yticks()) == named, height


def test_heat_shows_its_values_and_hatches_what_is_masked():
    panel = PANELS["masked"]
    swatch, ax, scale = axes_of(panel)
    shown = ax.images[0].get_array()
    assert np.array_equal(shown.data, panel.values)
    assert np.array_equal(shown.mask, CAUSAL)
    assert ax.images[0].get_clim() == panel.limits
    hatched = [patch for patch in ax.patches if patch.get_hatch()]
    assert sum(patch.get_width() for patch in hatched) == CAUSAL.sum()
    assert {t.get_text() for t in ax.texts} == {f"{v:.2f}" for v in panel.values[~CAUSAL]}


def test_tiles_show_each_map_on_the_same_scale():
    panel = PANELS["tiles"]
    images = [ax.images[0] for ax in axes_of(panel) if ax.images][:6]
    for image, values in zip(images, panel.values, strict=True):
        assert np.array_equal(image.get_array().data, values)
        assert image.get_clim() == panel.limits


def test_bars_are_as_high_as_their_values():
    (ax,) = axes_of(PANELS["bars"])
    assert [bar.get_height() for bar in ax.patches][:3] == [3, 0, 5]
    assert [t.get_text() for t in ax.texts] == ["3", "0", "5"]
    assert any(line.get_ydata()[0] == 2.5 for line in ax.lines)
    (ax,) = axes_of(PANELS["stacked"])
    heights = np.array([bar.get_height() for bar in ax.patches]).reshape(2, 4)
    assert np.allclose(heights, PANELS["stacked"].values)


def test_lines_go_through_their_values():
    (ax,) = axes_of(PANELS["lines"])
    for line, (name, y) in zip(ax.lines, PANELS["lines"].curves.items(), strict=False):
        assert line.get_label() == name
        assert np.array_equal(line.get_xdata(), PANELS["lines"].x)
        assert np.array_equal(line.get_ydata(), y)


def test_a_message_stands_above_the_picture():
    fig = agg.draw([[PANELS["bars"]]], 600, 300, "n=9 is too many. Choose 1 to 8.")
    assert "n=9 is too many. Choose 1 to 8." in [text.get_text() for text in fig.texts]


def test_tiles_stand_side_by_side_as_they_come_out_largest():
    assert agg.tiles_across(4, 10, 10, 400, 100, 20) == 4
    assert agg.tiles_across(4, 10, 10, 100, 500, 20) == 1
    assert agg.tiles_across(4, 10, 10, 300, 340, 20) == 2


def test_tiles_too_narrow_for_their_names_keep_the_number():
    assert agg.tile_names(["h 9", "h 10"], 60) == ["h 9", "h 10"]
    assert agg.tile_names(["h 9", "h 10"], 20) == ["9", "10"]
    assert agg.tile_names(["query 0 to 0", "query 1 to 0"], 20) == ["query 0 to 0", "query 1 to 0"]


def test_labels_far_apart_stay_flat():
    assert agg.plan_labels(["", "", "30", "", "", "60"], True, 14) == (1, False, agg.TEXT_LINE)
    assert agg.plan_labels(["30", "60", "90"], True, 14)[1]


def test_a_colour_bar_too_low_for_its_numbers_is_left_out():
    assert len(axes_of(Heat(np.eye(9), square=False))) == 2
    fig = agg.draw([[Heat(np.ones((1, 30)), square=True)]], 600, 120)
    assert len(fig.axes) == 1


def test_every_role_has_a_colour():
    for role in (*ROLE, "expert 3", "expert 11"):
        (ax,) = axes_of(Bars([1], "a", roles=[role]))
        assert ax.patches
