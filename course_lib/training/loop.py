"""One training step, with everything that is worth printing about it."""

from dataclasses import dataclass

from torch import Tensor, nn

from course_lib.model.checks import is_number, require

from .objective import ALPHA, balance_loss, next_token_loss


@dataclass(frozen=True)
class StepReport:
    """What one step measured before the weights moved. Module 13."""

    cross_entropy: float  # nats a token
    aux: float  # balance loss, summed over the MoE layers
    grad_norm: float  # of cross_entropy + aux, over all parameters, before clipping


def losses(model, ids: Tensor, targets: Tensor | None = None, alpha: float = ALPHA, forward=None):
    """Cross-entropy (nats a token) and balance loss of a batch ids (B, T).

    targets (B, T) defaults to ids: the real objective, shifted inside. forward is the model
    itself unless `compile_forward(model)` is given. Raises ValueError for ids or targets
    that do not fit and for a negative alpha. Module 13."""
    logits, router_logits = (forward or model)(ids)
    cross_entropy = next_token_loss(logits, ids if targets is None else targets)
    return cross_entropy, balance_loss(model, router_logits, alpha)


def check_finite(name: str, value: Tensor):
    require(
        bool(value.isfinite()),
        f"{name}={value.item()} is not finite.",
        "The weights were not changed: look for a too large learning rate.",
    )


def training_step(
    model,
    optimizer,
    ids: Tensor,
    targets: Tensor | None = None,
    alpha: float = ALPHA,
    max_norm: float | None = None,
    forward=None,
) -> StepReport:
    """Forward, backward, clip to max_norm, update; returns what it measured.

    forward is as in `losses`. Raises ValueError for a bad argument and when the loss or its
    gradient is not finite, and leaves the weights as they were. Module 13."""
    require(
        max_norm is None or (is_number(max_norm) and max_norm > 0),
        f"max_norm={max_norm!r} is no length that a gradient can be cut to.",
        "Give a number above 0, for example 1.0, or None to leave it.",
    )
    optimizer.zero_grad(set_to_none=True)
    cross_entropy, aux = losses(model, ids, targets, alpha, forward)
    loss = cross_entropy + aux
    check_finite("loss", loss)
    loss.backward()
    limit = float("inf") if max_norm is None else max_norm
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
    check_finite("grad_norm", grad_norm)
    optimizer.step()
    return StepReport(cross_entropy.item(), aux.item(), grad_norm.item())
