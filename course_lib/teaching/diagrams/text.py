"""How wide a text is drawn, on every machine the same."""

from dataclasses import dataclass
from functools import lru_cache

from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ft2font import LoadFlags

FAMILY = "DejaVu Sans"  # matplotlib brings it along, so it measures the same everywhere
CONDENSED = 0.9  # drawn narrower than it is cut, close to the width of Helvetica and Arial
# Whatever of these a browser has, `textLength` in the SVG gives it the width measured here.
WEB_FONTS = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"


@dataclass(frozen=True)
class Face:
    """Size in pixels and cut of a text."""

    size: float
    bold: bool = False
    italic: bool = False
    muted: bool = False

    @property
    def properties(self) -> FontProperties:
        weight = "bold" if self.bold else "normal"
        style = "italic" if self.italic else "normal"
        return FontProperties(family=FAMILY, weight=weight, style=style)


TITLE, DETAIL = Face(12.5, bold=True), Face(11, muted=True)
SHAPE, AXES = Face(11.5), Face(10.5, italic=True, muted=True)
HEADING = Face(15, bold=True)


@lru_cache(maxsize=4096)
def width_of(text: str, face: Face) -> float:
    """Width in pixels, without hinting and rounded to a hundredth."""
    font = get_font(findfont(face.properties))
    font.set_size(face.size, 72)
    font.set_text(text, 0, flags=LoadFlags.NO_HINTING)
    return round(font.get_width_height()[0] / 64 * CONDENSED, 2)
