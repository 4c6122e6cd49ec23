"""Exercises on the objective: the loss of the next token, and the balance of the experts."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from course_lib.training import load_balancing_loss, next_token_loss

from ..exercise import Case, Exercise, Mismatch, Mistake, named
from .inputs import normal, whole

# next_token_loss: the shift, the mean, and the labels that do not count

STUB = '''\
def my_loss(logits, ids, ignore_index=-100):
    """logits (B, T, V) and ids (B, T) of the same tokens to the mean loss in nats a token."""
    # 1. The logits at position t predict the token at t + 1: leave out one end of each.
    # 2. F.cross_entropy takes (N, V) and (N,), and ignore_index.
    # 3. The mean runs over the tokens that count; 0 where none does.
    ...


loss_function = check("next_token_loss", my_loss).use
'''


def loss_cases() -> list[Case]:
    sizes = dict(B=2, T=6, V=11)
    logits, ids = normal(31, 2, 6, 11), 1 + whole(32, 10, 2, 6)
    ragged = ids.clone()
    ragged[0, 3:], ragged[1, 0], ragged[1, 5] = -100, -100, -100
    padded = ids.clone()
    padded[0, 4:], padded[1, 2] = 0, 0
    nothing = ids.clone()
    nothing[:, 1:] = -100
    return [
        Case("all labels", sizes, dict(logits=logits, ids=ids)),
        Case("labels of -100 in rows of different length", sizes, dict(logits=logits, ids=ragged)),
        Case("ignore_index=0", sizes, dict(logits=logits, ids=padded, ignore_index=0)),
        Case("no label that counts", sizes, dict(logits=logits, ids=nothing)),
        Case("equal logits", sizes, dict(logits=torch.zeros(2, 6, 11), ids=ids)),
    ]


def run_loss(attempt, logits: Tensor, ids: Tensor, ignore_index: int = -100) -> dict:
    logits.requires_grad_()
    outputs = named(attempt(logits, ids, ignore_index), "the loss")
    loss = outputs["the loss"]
    if loss.dim() == 0 and not loss.requires_grad:
        raise Mismatch("no gradient flows from the loss to the logits")
    found = torch.zeros_like(logits)
    if loss.dim() == 0:
        (found,) = torch.autograd.grad(loss, logits, allow_unused=True, materialize_grads=True)
    return outputs | {"the gradient of the logits": found}


def uniform_is_ln_v(outputs: dict, case: Case) -> bool:
    if case.label != "equal logits" or outputs["the loss"].dim() > 0:
        return True
    return abs(outputs["the loss"].item() - math.log(case.sizes["V"])) < 1e-4


def last_predicts_nothing(outputs: dict, case: Case) -> bool:
    return not outputs["the gradient of the logits"][:, -1].any()


def nothing_costs_nothing(outputs: dict, case: Case) -> bool:
    return case.label != "no label that counts" or not outputs["the loss"].any()


def shifted(logits, ids):
    return logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()


def by_log_softmax(logits, ids, ignore_index=-100):
    """Right: the log-probability of each next token, gathered."""
    targets = ids[:, 1:]
    counts = targets != ignore_index
    log_p = logits[:, :-1].log_softmax(-1)
    picked = log_p.gather(-1, targets.masked_fill(~counts, 0).unsqueeze(-1)).squeeze(-1)
    return -(picked * counts).sum() / counts.sum().clamp(min=1)


def by_labels_moved(logits, ids, ignore_index=-100):
    """Right: labels moved to the left, the last one ignored."""
    last = torch.full_like(ids[:, :1], ignore_index)
    labels = torch.cat((ids[:, 1:], last), dim=1)
    total = F.cross_entropy(
        logits.transpose(1, 2), labels, ignore_index=ignore_index, reduction="sum"
    )
    return total / max(int((labels != ignore_index).sum()), 1)


def safe_mean(predicted, targets, ignore_index):
    total = F.cross_entropy(predicted, targets, ignore_index=ignore_index, reduction="sum")
    return total / (targets != ignore_index).sum().clamp(min=1)


def unshifted(logits, ids, ignore_index=-100):
    return safe_mean(logits.flatten(0, 1), ids.flatten(), ignore_index)


def unshifted_mean(logits, ids, ignore_index=-100):
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), ignore_index=ignore_index)


def shifted_twice(logits, ids, ignore_index=-100):
    return safe_mean(logits[:, :-2].flatten(0, 1), ids[:, 2:].flatten(), ignore_index)


def shifted_back(logits, ids, ignore_index=-100):
    return safe_mean(logits[:, 1:].flatten(0, 1), ids[:, :-1].flatten(), ignore_index)


def shifted_only_ends(logits, ids, ignore_index=-100):
    return safe_mean(logits[:, :-1].flatten(0, 1), ids[:, :-1].flatten(), ignore_index)


def ignore_index_fixed(logits, ids, ignore_index=-100):
    return safe_mean(*shifted(logits, ids), -100)


def mean_of_nothing(logits, ids, ignore_index=-100):
    return F.cross_entropy(*shifted(logits, ids), ignore_index=ignore_index)


def ignored_in_mean(logits, ids, ignore_index=-100):
    return F.cross_entropy(
        *shifted(logits, ids), ignore_index=ignore_index, reduction="none"
    ).mean()


def over_all_tokens(logits, ids, ignore_index=-100):
    total = F.cross_entropy(*shifted(logits, ids), ignore_index=ignore_index, reduction="sum")
    return total / ids.numel()


def over_rows(logits, ids, ignore_index=-100):
    total = F.cross_entropy(*shifted(logits, ids), ignore_index=ignore_index, reduction="sum")
    return total / len(ids)


def mean_of_rows(logits, ids, ignore_index=-100):
    pairs = zip(logits, ids, strict=True)
    return torch.stack(
        [safe_mean(row[:-1], label[1:], ignore_index) for row, label in pairs]
    ).mean()


def summed(logits, ids, ignore_index=-100):
    return F.cross_entropy(*shifted(logits, ids), ignore_index=ignore_index, reduction="sum")


def per_token(logits, ids, ignore_index=-100):
    return F.cross_entropy(*shifted(logits, ids), ignore_index=ignore_index, reduction="none")


def in_bits(logits, ids, ignore_index=-100):
    return next_token_loss(logits, ids, ignore_index) / math.log(2)


def softmax_before(logits, ids, ignore_index=-100):
    return next_token_loss(logits.softmax(-1), ids, ignore_index)


def reshaped_to_classes(logits, ids, ignore_index=-100):
    logits, targets = logits[:, :-1], ids[:, 1:]
    wrong = logits.reshape(len(logits), logits.shape[-1], -1)
    total = F.cross_entropy(wrong, targets, ignore_index=ignore_index, reduction="sum")
    return total / (targets != ignore_index).sum().clamp(min=1)


def inputs_ignored(logits, ids, ignore_index=-100):
    """Positions whose own token is ignored are left out as well."""
    predicted, targets = shifted(logits, ids)
    own = ids[:, :-1].flatten() == ignore_index
    return safe_mean(predicted, targets.masked_fill(own, ignore_index), ignore_index)


def negated(logits, ids, ignore_index=-100):
    return -next_token_loss(logits, ids, ignore_index)


def perplexity(logits, ids, ignore_index=-100):
    return next_token_loss(logits, ids, ignore_index).exp()


def as_number(logits, ids, ignore_index=-100):
    return next_token_loss(logits, ids, ignore_index).item()


def detached(logits, ids, ignore_index=-100):
    return next_token_loss(logits.detach(), ids, ignore_index)


LOSS_MISTAKES = (
    Mistake("unshifted", "the labels were not shifted: the logits at position t predict the token "
            "at t + 1, so this rewards copying the input", unshifted, unshifted_mean),
    Mistake("shifted twice", "the labels were shifted twice: logits[:, :-1] meets ids[:, 1:], "
            "one step apart and not two", shifted_twice),
    Mistake("shifted back", "the shift goes the wrong way: each position predicts the token "
            "before it, which it has seen", shifted_back),
    Mistake("ends cut alike", "logits and ids were cut at the same end, so nothing was shifted: "
            "logits[:, :-1] and ids[:, 1:]", shifted_only_ends),
    Mistake("ignore_index not used", "ignore_index was not passed on: with another value than "
            "-100 the padding counts as a label", ignore_index_fixed),
    Mistake("mean of nothing", "without any label that counts the mean is 0 / 0, NaN, and one "
            "such batch destroys the weights: divide by at least 1", mean_of_nothing),
    Mistake("ignored labels in the mean", "the mean runs over ignored labels too: divide by the "
            "number of labels that count", ignored_in_mean),
    Mistake("divided by B T", "the sum was divided by B T: B of these tokens are never predicted "
            "and ignored ones do not count either", over_all_tokens),
    Mistake("divided by B", "the sum was divided by the number of rows: the loss is a mean over "
            "tokens, or long sequences weigh more", over_rows),
    Mistake("mean of means", "each row was averaged by itself and then the rows: a token of a "
            "short row then counts more than one of a long row", mean_of_rows),
    Mistake("sum", "this is the sum over the tokens, not their mean: it grows with the batch",
            summed),
    Mistake("no reduction", "this is a loss for each token: the objective is one number, their "
            "mean", per_token),
    Mistake("bits", "the loss is in bits (log 2): cross-entropy is in nats, so that equal logits "
            "give ln V", in_bits),
    Mistake("softmax before", "softmax came before cross_entropy, which takes one itself: give it "
            "the logits", softmax_before),
    Mistake("reshape instead of transpose", "(B, T, V) was reshaped to (B, V, T), which mixes "
            "tokens and vocabulary: transpose, or flatten to (B T, V)", reshaped_to_classes),
    Mistake("ignored inputs", "positions were left out because their own token is ignored: what "
            "counts is whether the next token is a label", inputs_ignored),
    Mistake("sign", "the sign is wrong: the loss is minus the log-probability, so it is positive",
            negated),
    Mistake("perplexity", "this is the perplexity, exp of the loss: train on the loss", perplexity),
    Mistake("a Python number", "the loss is a Python number: keep the tensor, or backward has "
            "nothing to follow", as_number),
    Mistake("detached", "no gradient flows to the logits: they were detached on the way",
            detached),
)  # fmt: skip

NEXT_TOKEN_LOSS = Exercise(
    name="next_token_loss",
    module="16",
    prompt="Score each position on the token after it, and average over the labels that count.",
    signature=("logits", "ids", "ignore_index"),
    reference=next_token_loss,
    stub=STUB,
    make_cases=loss_cases,
    run=run_loss,
    axes={"the loss": "", "the gradient of the logits": "B T V"},
    properties={
        "equal logits cost ln V": uniform_is_ln_v,
        "the last position predicts nothing, so it gets no gradient": last_predicts_nothing,
        "the loss is 0, not NaN": nothing_costs_nothing,
    },
    equivalents={"log-softmax and gather": by_log_softmax, "labels moved left": by_labels_moved},
    mistakes=LOSS_MISTAKES,
)

# balance_loss: what keeps the experts of one layer equally busy

BALANCE_STUB = '''\
def my_balance_loss(router_logits, topk_idx, n_experts, alpha=0.01):
    """router_logits (N, E) and chosen experts topk_idx (N, k) of one layer to a scalar."""
    # 1. f (E,): how often each expert was chosen, a token; F.one_hot helps.
    # 2. P (E,): the mean of the softmax over all experts.
    # 3. alpha * E * sum of f * P; the gradient flows through P.
    ...


balance = check("balance_loss", my_balance_loss).use
'''


def balance_cases() -> list[Case]:
    sizes = dict(N=14, E=6, k=3)
    logits = 2 * normal(41, 14, 6)
    one = dict(sizes, k=1)
    even = torch.stack([(torch.arange(12) + i) % 6 for i in range(2)], dim=1)
    return [
        Case("3 of 6 experts", sizes, balance_inputs(logits, 3, alpha=0.01)),
        Case("1 of 6 experts", one, balance_inputs(2 * normal(42, 14, 6), 1, alpha=0.5)),
        Case("even use", dict(N=12, E=6, k=2), dict(router_logits=torch.zeros(12, 6),
                                                    topk_idx=even, n_experts=6, alpha=0.02)),
    ]  # fmt: skip


def balance_inputs(logits: Tensor, k: int, alpha: float) -> dict:
    chosen = logits.topk(k).indices
    return dict(router_logits=logits, topk_idx=chosen, n_experts=6, alpha=alpha)


def run_balance(attempt, router_logits: Tensor, topk_idx, n_experts: int, alpha: float) -> dict:
    router_logits.requires_grad_()
    loss = named(attempt(router_logits, topk_idx, n_experts, alpha), "the loss")["the loss"]
    found = torch.zeros_like(router_logits)
    if loss.dim() == 0 and loss.requires_grad:
        (found,) = torch.autograd.grad(
            loss, router_logits, allow_unused=True, materialize_grads=True
        )
    return {"the loss": loss, "the gradient of the router logits": found}


def even_use_costs_alpha_k(outputs: dict, case: Case) -> bool:
    if case.label != "even use" or outputs["the loss"].dim() > 0:
        return True
    return math.isclose(outputs["the loss"].item(), 0.02 * 2, rel_tol=1e-4)


def gradient_flows(outputs: dict, case: Case) -> bool:
    return case.label == "even use" or bool(outputs["the gradient of the router logits"].any())


def shares(router_logits, topk_idx, n_experts):
    f = F.one_hot(topk_idx, n_experts).sum(1).float().mean(0)
    return f, router_logits.softmax(-1).mean(0)


def by_counting(router_logits, topk_idx, n_experts, alpha=0.01):
    """Right: bincount over all slots, divided by the tokens."""
    f = torch.bincount(topk_idx.flatten(), minlength=n_experts) / len(topk_idx)
    return alpha * n_experts * (f @ router_logits.softmax(-1).mean(0))


def by_tokens(router_logits, topk_idx, n_experts, alpha=0.01):
    """Right: the same double sum, probabilities first."""
    f, _ = shares(router_logits, topk_idx, n_experts)
    return alpha * n_experts * (router_logits.softmax(-1) * f).sum(-1).mean()


def without_experts(router_logits, topk_idx, n_experts, alpha=0.01):
    f, P = shares(router_logits, topk_idx, n_experts)
    return alpha * (f * P).sum()


def without_alpha(router_logits, topk_idx, n_experts, alpha=0.01):
    f, P = shares(router_logits, topk_idx, n_experts)
    return n_experts * (f * P).sum()


def mean_over_experts(router_logits, topk_idx, n_experts, alpha=0.01):
    f, P = shares(router_logits, topk_idx, n_experts)
    return alpha * n_experts * (f * P).mean()


def divided_by_k(router_logits, topk_idx, n_experts, alpha=0.01):
    return load_balancing_loss(router_logits, topk_idx, n_experts, alpha, divide_by_k=True)


def soft_twice(router_logits, topk_idx, n_experts, alpha=0.01):
    P = router_logits.softmax(-1).mean(0)
    return alpha * n_experts * (P * P).sum()


def hard_twice(router_logits, topk_idx, n_experts, alpha=0.01):
    f, _ = shares(router_logits, topk_idx, n_experts)
    return alpha * n_experts * (f * f).sum()


def first_choice_only(router_logits, topk_idx, n_experts, alpha=0.01):
    return load_balancing_loss(router_logits, topk_idx[:, :1], n_experts, alpha)


def selected_only(router_logits, topk_idx, n_experts, alpha=0.01):
    f, _ = shares(router_logits, topk_idx, n_experts)
    chosen = F.one_hot(topk_idx, n_experts).sum(1).bool()
    P = router_logits.masked_fill(~chosen, -torch.inf).softmax(-1).mean(0)
    return alpha * n_experts * (f * P).sum()


def softmax_of_mean(router_logits, topk_idx, n_experts, alpha=0.01):
    f, _ = shares(router_logits, topk_idx, n_experts)
    return alpha * n_experts * (f * router_logits.mean(0).softmax(-1)).sum()


def softmax_over_tokens(router_logits, topk_idx, n_experts, alpha=0.01):
    f, _ = shares(router_logits, topk_idx, n_experts)
    return alpha * n_experts * (f * router_logits.softmax(0).mean(0)).sum()


def logits_as_probabilities(router_logits, topk_idx, n_experts, alpha=0.01):
    f, _ = shares(router_logits, topk_idx, n_experts)
    return alpha * n_experts * (f * router_logits.mean(0)).sum()


def counts_not_means(router_logits, topk_idx, n_experts, alpha=0.01):
    f, P = shares(router_logits, topk_idx, n_experts)
    return alpha * n_experts * (len(topk_idx) * f * P).sum()


def probabilities_detached(router_logits, topk_idx, n_experts, alpha=0.01):
    return load_balancing_loss(router_logits.detach(), topk_idx, n_experts, alpha)


def squared_distance(router_logits, topk_idx, n_experts, alpha=0.01):
    f, P = shares(router_logits, topk_idx, n_experts)
    return alpha * n_experts * ((P - 1 / n_experts) ** 2).sum()


BALANCE_MISTAKES = (
    Mistake("no factor E", "the factor E is missing: with it even use costs alpha k, whatever "
            "the number of experts; a mean over the experts takes it away again", without_experts,
            mean_over_experts),
    Mistake("no alpha", "alpha is missing: the balance loss would outweigh the cross-entropy",
            without_alpha),
    Mistake("divided by k", "the loss was divided by k: here f counts the selections a token, "
            "which sum to k; the other convention is divide_by_k=True", divided_by_k),
    Mistake("P twice", "f was made from probabilities too, P * P: f counts what was really chosen",
            soft_twice),
    Mistake("f twice", "f was used twice: counting has no gradient, the second factor is P, the "
            "mean of the softmax", hard_twice),
    Mistake("first choice only", "only the first choice of each token was counted: all k of "
            "topk_idx are selections", first_choice_only),
    Mistake("P of the chosen only", "the softmax ran over the chosen experts only: P is the mean "
            "of the softmax over all of them", selected_only),
    Mistake("softmax of the mean", "the logits were averaged before the softmax: P is the mean of "
            "each token's softmax", softmax_of_mean),
    Mistake("softmax over tokens", "softmax ran over the tokens (dim 0): each token's "
            "probabilities over the experts (dim -1) sum to 1", softmax_over_tokens),
    Mistake("logits instead of P", "P is a mean of logits: take the softmax of each token first",
            logits_as_probabilities),
    Mistake("counts", "f is a count, not a mean over the tokens: the loss grows with the batch",
            counts_not_means),
    Mistake("no gradient", "the value is right, but no gradient reaches the router: P was "
            "detached, so nothing would be balanced", probabilities_detached),
    Mistake("squared distance", "this is the squared distance of P from even use: the loss is "
            "E times the sum of f P, which sees what was chosen", squared_distance),
)  # fmt: skip

BALANCE_LOSS = Exercise(
    name="balance_loss",
    module="12",
    prompt="Make the crowding of experts cost something that has a gradient.",
    signature=("router_logits", "topk_idx", "n_experts", "alpha"),
    reference=load_balancing_loss,
    stub=BALANCE_STUB,
    make_cases=balance_cases,
    run=run_balance,
    axes={"the loss": "", "the gradient of the router logits": "N E"},
    properties={
        "even use costs alpha k": even_use_costs_alpha_k,
        "a gradient reaches the router": gradient_flows,
    },
    equivalents={"bincount": by_counting, "token by token": by_tokens},
    mistakes=BALANCE_MISTAKES,
)
