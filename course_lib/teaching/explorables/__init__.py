"""Every explorable by name; the general tests run all that stand here."""

from collections.abc import Callable
from importlib import import_module

from course_lib.teaching.explore import Explorable

# name: (module, factory); a module is imported when its explorable is asked for
PLACES = {
    "kv_calculator": ("heads", "calculator_explorable"),
    "kv_intensity": ("heads", "intensity_explorable"),
    "kv_sharing": ("heads", "sharing_explorable"),
    "mla_cell": ("heads", "cell_explorable"),
    "smollm2_heads": ("heads", "smollm2_explorable"),
    "moe_balance": ("moe", "balance_explorable"),
    "moe_capacity": ("moe", "capacity_explorable"),
    "moe_combinations": ("moe", "combinations_explorable"),
    "moe_conventions": ("moe", "conventions_explorable"),
    "moe_models": ("moe", "models_explorable"),
    "moe_parameters": ("moe", "parameters_explorable"),
    "alibi": ("rope", "alibi_explorable"),
    "clock": ("rope", "clock_explorable"),
    "permutation": ("rope", "permutation_explorable"),
    "position_precision": ("rope", "precision_explorable"),
    "score_against_distance": ("rope", "score_explorable"),
    "sinusoids": ("rope", "sinusoid_explorable"),
    "wavelengths": ("rope", "ladder_explorable"),
    "router": ("router", "router_explorable"),
    "shapes": ("shapes", "shape_explorer"),
    "attention_maps": ("attention_maps", "attention_maps"),
    "stepper": ("stepper", "generation_stepper"),
    "switchboard": ("switchboard", "bug_switchboard"),
}


def factory(module: str, name: str) -> Callable[[], Explorable]:
    """A function that imports the module at its first call and makes fresh widgets at each."""

    def make() -> Explorable:
        return getattr(import_module(f"{__name__}.{module}"), name)()

    make.__name__ = name
    return make


EXPLORABLES = {name: factory(*place) for name, place in PLACES.items()}
