"""The one widget that shows the picture of an explorable: it draws what `wire` has packed."""

from importlib.resources import files

import anywidget
import traitlets

from course_lib.teaching import theme

STATIC = files("course_lib.teaching") / "static"


def palette() -> dict:
    """The theme as the browser needs it: colours in both lights, stops of the colour maps."""
    return {
        "roles": theme.ROLE,
        "experts": list(theme.EXPERTS),
        "masked": theme.MASKED,
        "hatch": theme.HATCH,
        "sequential": {light: list(s) for light, s in theme.SEQUENTIAL_STOPS.items()},
        "diverging": {light: list(s) for light, s in theme.DIVERGING_STOPS.items()},
    }


class Canvas(anywidget.AnyWidget):
    """Panels drawn in the browser; clicks come back as messages {"event": "pick", ...}.

    picture is what `wire.encode` made, with alt text, finding, code line and row heights;
    status is {"state": "ok" | "busy" | "refused" | "failed", "text": ...}."""

    _esm = (STATIC / "canvas.js").read_text(encoding="utf-8")
    _css = (STATIC / "canvas.css").read_text(encoding="utf-8")

    picture = traitlets.Dict().tag(sync=True)
    status = traitlets.Dict().tag(sync=True)
    palette = traitlets.Dict().tag(sync=True)

    def __init__(self):
        super().__init__(palette=palette(), status={"state": "ok", "text": ""})
