"""Fitting a decoder: the objective and one step of it."""

from .balance import update_selection_bias
from .compiled import compile_forward
from .loop import StepReport, losses, training_step
from .objective import balance_loss, load_balancing_loss, next_token_loss

__all__ = [
    "StepReport",
    "balance_loss",
    "compile_forward",
    "load_balancing_loss",
    "losses",
    "next_token_loss",
    "training_step",
    "update_selection_bias",
]
