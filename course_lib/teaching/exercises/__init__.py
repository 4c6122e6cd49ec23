"""Every exercise by name, each in the file of its topic, imported when it is asked for.

To add one: write `NAME = Exercise(name="name", ...)` in a file of this folder and list it here.
"""

from importlib import import_module

from ..exercise import Exercise

EXERCISES = {
    "absorbed_attention": "latent",
    "balance_loss": "loss",
    "biased_routing": "moe",
    "cache_size": "latent",
    "capacity": "moe",
    "decode_step": "generation",
    "grouped_query_attention": "attention",
    "next_token_loss": "loss",
    "rotate_heads": "rope",
    "top_k_routing": "routing",
    "yarn_frequencies": "rope",
}


def load(name: str) -> Exercise:
    """The exercise called `name`. Raises KeyError. Module 16."""
    return getattr(import_module(f".{EXERCISES[name]}", __package__), name.upper())
