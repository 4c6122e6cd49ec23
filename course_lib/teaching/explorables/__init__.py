"""Every explorable by name; the general tests run all that stand here."""

from collections.abc import Callable
from importlib import import_module

from course_lib.teaching.explore import Explorable

# name: (module, factory); a module is imported when its explorable is asked for
PLACES = {
    "router": ("router", "router_explorable"),
    "shapes": ("shapes", "shape_explorer"),
}


def factory(module: str, name: str) -> Callable[[], Explorable]:
    """A function that imports the module at its first call and makes fresh widgets at each."""

    def make() -> Explorable:
        return getattr(import_module(f"{__name__}.{module}"), name)()

    make.__name__ = name
    return make


EXPLORABLES = {name: factory(*place) for name, place in PLACES.items()}
