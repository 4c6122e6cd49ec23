"""The theme: legible on light and dark, distinct for colour-blind readers, stable bytes."""

import io
import itertools
import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from course_lib.teaching import theme

# Machado, Oliveira and Fernandes 2009, severity 1: linear RGB as such readers see it.
SEEN_BY = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
}
# Roles that stand side by side in one picture.
TOGETHER = (
    ("stream", "q", "k", "v", "scores"),
    ("q", "k", "v", "cache", "norm"),
    ("stream", "router", "experts", "shared"),
)


def linear(colour) -> np.ndarray:
    rgb = np.array(to_rgb(colour))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def luminance(colour) -> float:
    return float(linear(colour) @ [0.2126, 0.7152, 0.0722])


def contrast(a, b) -> float:
    """The ratio of WCAG 2: 3 is wanted of graphics, 4.5 of text."""
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    """OKLab (Ottosson 2020) of linear RGB."""
    lms = np.cbrt(
        np.clip(
            np.array(
                [
                    [0.41222147, 0.53633254, 0.05144599],
                    [0.21190350, 0.68069955, 0.10739696],
                    [0.08830246, 0.28171884, 0.62997870],
                ]
            )
            @ rgb,
            0,
            None,
        )
    )
    return (
        np.array(
            [
                [0.21045426, 0.79361779, -0.00407205],
                [1.97799850, -2.42859220, 0.45059371],
                [0.02590404, 0.78277177, -0.80867577],
            ]
        )
        @ lms
    )


def distance(a, b, seen_by: np.ndarray) -> float:
    return float(np.linalg.norm(lab(seen_by @ linear(a)) - lab(seen_by @ linear(b))))


@pytest.mark.parametrize("light", ["light", "dark"])
def test_every_role_stands_out_on_both_papers(light):
    for role, colour in theme.ROLE.items():
        assert contrast(colour, theme.PAPER[light]) >= 3, role
    for colour in theme.EXPERTS:
        assert contrast(colour, theme.PAPER[light]) >= 3, colour
    assert contrast(theme.INK[light], theme.PAPER[light]) >= 7


@pytest.mark.parametrize("reader", SEEN_BY)
def test_roles_that_stand_together_are_told_apart(reader):
    for group in TOGETHER:
        for a, b in itertools.combinations(group, 2):
            apart = distance(theme.ROLE[a], theme.ROLE[b], SEEN_BY[reader])
            assert apart >= 0.06, f"{a} and {b} are {apart:.3f} apart"


@pytest.mark.parametrize("reader", SEEN_BY)
def test_neighbouring_experts_are_told_apart(reader):
    ring = (*theme.EXPERTS, theme.EXPERTS[0])
    for a, b in itertools.pairwise(ring):
        assert distance(a, b, SEEN_BY[reader]) >= 0.06, (a, b)


@pytest.mark.parametrize("light", ["light", "dark"])
def test_maps_grow_evenly_from_the_paper(light):
    steps = [luminance(colour) for colour in theme.SEQUENTIAL_STOPS[light]]
    assert all(np.diff(steps) < 0) if light == "light" else all(np.diff(steps) > 0)
    assert contrast(theme.SEQUENTIAL_STOPS[light][0], theme.PAPER[light]) < 1.2
    left, middle, right = (theme.DIVERGING_STOPS[light][i] for i in (0, 2, 4))
    assert contrast(middle, theme.PAPER[light]) < 1.2
    assert abs(np.log(contrast(left, middle) / contrast(right, middle))) < 0.35


@pytest.mark.parametrize("light", ["light", "dark"])
def test_masked_is_neither_zero_nor_paper(light):
    zero = theme.SEQUENTIAL_STOPS[light][0]
    assert distance(theme.MASKED[light], zero, np.eye(3)) >= 0.06
    assert contrast(theme.HATCH[light], theme.MASKED[light]) >= 1.5


def test_an_expert_keeps_its_colour():
    assert theme.role_colour("expert 3") == theme.role_colour("expert 11") == theme.EXPERTS[3]
    assert theme.role_colour("q") == theme.ROLE["q"]
    with pytest.raises(ValueError, match="role='heads' has no colour"):
        theme.role_colour("heads")


def sketch():
    fig, ax = theme.figure(6, 3)
    ax.plot([1, 2, 3], color=theme.ROLE["q"], label="queries")
    ax.set(title="It grows", xlabel="step", ylabel="size")
    ax.legend()
    return fig


def test_text_is_legible_on_a_slide():
    # a figure 9.6 inches wide fills a slide of 13.3
    fig, axes = theme.figure(9.6, 3, ncols=2)
    axes[0].set(title="t", xlabel="x", ylabel="y")
    sizes = [t.get_fontsize() for t in fig.findobj(lambda a: hasattr(a, "get_fontsize"))]
    assert min(sizes) * 13.3 / 9.6 >= 12


def test_show_stores_a_picture_and_a_line():
    data, metadata = theme.show(sketch(), alt="It grows.", summary="1, 2, 3")._repr_mimebundle_()
    assert data["text/plain"] == "1, 2, 3"
    assert metadata["image/png"] == {"alt": "It grows.", "width": 600}
    again, _ = theme.show(sketch(), alt="It grows.")._repr_mimebundle_()
    assert again["image/png"] == data["image/png"]
    assert again["text/plain"] == "It grows."
    with pytest.raises(ValueError, match="alt="):
        theme.show(sketch(), alt=" ")


def test_a_png_of_few_colours_looks_as_it_was_drawn():
    fig, axes = theme.figure(6, 3, ncols=3)
    for ax, colours in zip(axes[:2], (theme.SEQUENTIAL, theme.DIVERGING), strict=True):
        ax.imshow(np.linspace(0, 1, 4096).reshape(64, 64), cmap=colours, aspect="auto")
    for i, role in enumerate(theme.ROLE):
        axes[2].plot([0, 1], [i, i + 1], color=theme.role_colour(role), label=role)
    theme.png_of(fig)  # a second drawing moves the axes a little
    stored, drawn = Image.open(io.BytesIO(theme.png_of(fig))), io.BytesIO()
    assert stored.mode == "P"
    with matplotlib.rc_context(theme.STYLE):
        fig.savefig(drawn, format="png", dpi=theme.DPI * theme.SHARPNESS)
    before = np.asarray(Image.open(drawn).convert("RGB"), int)
    after = np.asarray(stored.convert("RGB"), int)
    assert np.abs(after - before).max() <= 10
    assert (after[(before == 255).all(-1)] == 255).all(), "paper stays white"


def test_save_writes_the_same_bytes_and_leaves_equal_files_alone(tmp_path):
    paths = theme.save(sketch(), "growth", tmp_path)
    assert [path.name for path in paths] == ["growth.svg", "growth.png"]
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in paths]
    theme.save(sketch(), "growth", tmp_path)
    assert [(path.read_bytes(), path.stat().st_mtime_ns) for path in paths] == before


def test_figures_stay_outside_pyplot(monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    theme.show(sketch(), alt="It grows.")._repr_mimebundle_()
    assert "matplotlib.pyplot" not in sys.modules
