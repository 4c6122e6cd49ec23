"""Exercises of module 12: routing steered by a bias, and buffers of fixed size."""

import torch
import torch.nn.functional as F
from torch import Tensor

from course_lib.model import Router, keep_within_capacity, route
from course_lib.model.moe import close_groups

from ..exercise import Case, Exercise, Mismatch, Mistake, gradient, named, same
from .inputs import normal, whole

# biased_routing: which experts DeepSeek-V3's router chooses, and what they weigh

BIASED_STUB = '''\
def biased_routing(router_logits, k, router, bias):
    """(N, E) logits and a bias (E,) to weights and indices (N, k), as DeepSeek-V3 routes."""
    # 1. Scores are sigmoids. The bias is added for ranking only: ranked = scores + bias.
    # 2. The E experts stand in router.n_groups groups of neighbours. A group's worth is the
    #    sum of its two best ranked; only the router.n_groups_active best groups stay open.
    # 3. Each token takes the k best ranked of its open groups.
    # 4. Weights: the chosen scores without bias, divided by their sum, times router.scaling.
    ...


biased_routing = check("biased_routing", biased_routing).use
'''

LIKE_V3 = Router("sigmoid", selection_bias=True, n_groups=4, n_groups_active=2, scaling=2.5)


def biased_cases() -> list[Case]:
    sizes = dict(N=11, E=12, k=3)
    some = torch.tensor([0.1, -0.2, 0.3, 0.0, -0.4, 0.2, 0.25, -0.1, 0.0, 0.35, -0.3, 0.15])
    spread = normal(8, 11, 12) * 1.5
    return [
        Case("a bias of both signs", sizes,
             dict(router_logits=spread, k=3, router=LIKE_V3, bias=some)),
        Case("biases that make every ranked score negative", sizes,
             dict(router_logits=normal(9, 11, 12), k=3, router=LIKE_V3, bias=some - 2)),
        Case("one open group, as many experts as it has", sizes,
             dict(router_logits=normal(10, 11, 12), k=3, bias=some,
                  router=Router("sigmoid", selection_bias=True, n_groups=4, scaling=1.5))),
    ]  # fmt: skip


def run_biased(attempt, router_logits: Tensor, k: int, router: Router, bias: Tensor) -> dict:
    """Laid out by expert: in which order a token's k experts are listed does not matter."""
    leaf = router_logits.clone().requires_grad_()
    outputs = named(attempt(leaf, k, router, bias.clone()), "weights", "indices")
    weights, chosen = outputs["weights"], outputs["indices"]
    if chosen.shape != (len(leaf), k) or weights.shape != chosen.shape:
        raise Mismatch(
            f"it returns weights {tuple(weights.shape)} and indices {tuple(chosen.shape)}; "
            f"expected both (N, k) = {(len(leaf), k)}"
        )
    by_expert = torch.zeros_like(leaf).scatter_add(1, chosen, weights)
    times = torch.zeros_like(leaf).scatter_add(1, chosen, torch.ones_like(weights)).detach()
    return {
        "how often each expert is chosen": times,
        "weights by expert": by_expert,
        "gradient of the logits": gradient(by_expert, leaf),
    }


def distinct(outputs: dict, case: Case) -> bool:
    return outputs["how often each expert is chosen"].max().item() <= 1


def sums_to_scaling(outputs: dict, case: Case) -> bool:
    sums = outputs["weights by expert"].detach().sum(-1)
    return same(sums, torch.full_like(sums, case.inputs["router"].scaling), 1e-4)


def chosen_of(ranked: Tensor, k: int, router: Router) -> Tensor:
    return close_groups(ranked, router).topk(k, dim=-1).indices


def weigh(scores: Tensor, chosen: Tensor, router: Router) -> Tensor:
    weights = scores.gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True) * router.scaling


def by_sorting(router_logits, k, router, bias):
    """Right: groups and experts by sorting, weights by multiplication with a mask."""
    scores = router_logits.sigmoid()
    ranked = (scores + bias).view(len(scores), router.n_groups, -1)
    worth = ranked.sort(-1, descending=True).values[..., :2].sum(-1)
    best = worth.argsort(-1, descending=True)[:, : router.n_groups_active]
    is_open = F.one_hot(best, router.n_groups).sum(1).bool().unsqueeze(-1)
    ranked = torch.where(is_open, ranked, -torch.inf).flatten(1)
    chosen = ranked.argsort(-1, descending=True)[:, :k]
    mask = F.one_hot(chosen, scores.shape[1]).sum(1)
    share = scores * mask / (scores * mask).sum(-1, keepdim=True)
    return (share * router.scaling).gather(1, chosen), chosen


def token_by_token(router_logits, k, router, bias):
    """Right: each token alone, its experts in rising order."""
    rows = []
    for logits in router_logits:
        scores = logits.sigmoid()
        groups = (scores + bias).chunk(router.n_groups)
        worth = torch.stack([group.topk(2).values.sum() for group in groups])
        width, is_open = len(groups[0]), worth.topk(router.n_groups_active).indices.tolist()
        experts = torch.tensor([g * width + i for g in is_open for i in range(width)])
        chosen = experts[(scores + bias)[experts].topk(k).indices].sort().values
        rows.append((scores[chosen] / scores[chosen].sum() * router.scaling, chosen))
    return tuple(torch.stack(part) for part in zip(*rows, strict=True))


def bias_in_weights(router_logits, k, router, bias):
    scores = router_logits.sigmoid() + bias
    chosen = chosen_of(scores, k, router)
    return weigh(scores, chosen, router), chosen


def bias_ignored(router_logits, k, router, bias):
    scores = router_logits.sigmoid()
    chosen = chosen_of(scores, k, router)
    return weigh(scores, chosen, router), chosen


def bias_on_logits(router_logits, k, router, bias):
    scores = router_logits.sigmoid()
    chosen = chosen_of((router_logits + bias).sigmoid(), k, router)
    return weigh(scores, chosen, router), chosen


def bias_subtracted(router_logits, k, router, bias):
    return route(router_logits, k, router, -bias)


def softmax_scores(router_logits, k, router, bias):
    scores = router_logits.softmax(-1)
    chosen = chosen_of(scores + bias, k, router)
    return weigh(scores, chosen, router), chosen


def not_divided(router_logits, k, router, bias):
    scores = router_logits.sigmoid()
    chosen = chosen_of(scores + bias, k, router)
    return scores.gather(-1, chosen) * router.scaling, chosen


def divided_by_all(router_logits, k, router, bias):
    scores = router_logits.sigmoid()
    chosen = chosen_of(scores + bias, k, router)
    share = scores / scores.sum(-1, keepdim=True)
    return share.gather(-1, chosen) * router.scaling, chosen


def softmax_of_scores(router_logits, k, router, bias):
    scores = router_logits.sigmoid()
    chosen = chosen_of(scores + bias, k, router)
    return scores.gather(-1, chosen).softmax(-1) * router.scaling, chosen


def scaling_forgotten(router_logits, k, router, bias):
    weights, chosen = route(router_logits, k, router, bias)
    return weights / router.scaling, chosen


def scaled_before(router_logits, k, router, bias):
    scores = router_logits.sigmoid() * router.scaling
    chosen = chosen_of(router_logits.sigmoid() + bias, k, router)
    weights = scores.gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True), chosen


def groups_ignored(router_logits, k, router, bias):
    scores = router_logits.sigmoid()
    chosen = (scores + bias).topk(k, dim=-1).indices
    return weigh(scores, chosen, router), chosen


def with_open_groups(router_logits, k, router, bias, worth_of, closed=-torch.inf, spread=False):
    """The reference with another worth of a group, another mask or another layout."""
    scores = router_logits.sigmoid()
    shape = (-1, router.n_groups) if spread else (router.n_groups, -1)
    axis = 1 if spread else 2
    ranked = (scores + bias).unflatten(-1, shape)
    best = worth_of(ranked, axis).topk(router.n_groups_active, dim=-1).indices
    is_open = F.one_hot(best, router.n_groups).sum(1).bool().unsqueeze(axis)
    ranked = torch.where(is_open, ranked, torch.full_like(ranked, closed)).flatten(1)
    chosen = ranked.topk(k, dim=-1).indices
    return weigh(scores, chosen, router), chosen


def two_best(ranked: Tensor, axis: int) -> Tensor:
    return ranked.topk(2, dim=axis).values.sum(axis)


def group_by_best(router_logits, k, router, bias):
    return with_open_groups(router_logits, k, router, bias, lambda ranked, axis: ranked.amax(axis))


def group_by_sum(router_logits, k, router, bias):
    return with_open_groups(router_logits, k, router, bias, lambda ranked, axis: ranked.sum(axis))


def group_by_mean(router_logits, k, router, bias):
    return with_open_groups(router_logits, k, router, bias, lambda ranked, axis: ranked.mean(axis))


def closed_with_zero(router_logits, k, router, bias):
    return with_open_groups(router_logits, k, router, bias, two_best, closed=0.0)


def groups_interleaved(router_logits, k, router, bias):
    return with_open_groups(router_logits, k, router, bias, two_best, spread=True)


def groups_without_bias(router_logits, k, router, bias):
    def worth(ranked, axis):
        return two_best(router_logits.sigmoid().view_as(ranked), axis)

    return with_open_groups(router_logits, k, router, bias, worth)


def one_group(router_logits, k, router, bias):
    if router.n_groups_active == 1:
        return route(router_logits, k, router, bias)
    single = Router("sigmoid", n_groups=router.n_groups, scaling=router.scaling)
    return route(router_logits, k, single, bias)


def best_repeated(router_logits, k, router, bias):
    scores = router_logits.sigmoid()
    chosen = chosen_of(scores + bias, 1, router).expand(-1, k)
    return weigh(scores, chosen, router), chosen


def detached(router_logits, k, router, bias):
    return route(router_logits.detach(), k, router, bias)


BIASED_MISTAKES = (
    Mistake("bias in the weights", "the bias is in the weights too: it may steer the choice only, "
            "or balancing would change what the layer computes", bias_in_weights),
    Mistake("bias ignored", "the bias is not used: it belongs to the scores before experts and "
            "groups are ranked", bias_ignored),
    Mistake("bias on the logits", "the bias was added before the sigmoid: it is in units of "
            "scores, so add it after", bias_on_logits),
    Mistake("bias subtracted", "the bias was subtracted: a larger bias makes an expert more "
            "likely", bias_subtracted),
    Mistake("softmax scores", "scores are a softmax: here each is a sigmoid of its own logit, "
            "experts do not compete before the ranking", softmax_scores),
    Mistake("not divided", "the weights of a token do not sum to router.scaling: divide the chosen "
            "scores by their sum", not_divided),
    Mistake("divided by all", "the weights were divided by the sum over all experts: divide by the "
            "sum of the chosen ones", divided_by_all),
    Mistake("softmax of the scores", "a softmax was taken over the chosen scores: they are "
            "divided by their sum, nothing is exponentiated", softmax_of_scores),
    Mistake("scaling forgotten", "router.scaling is missing, or cancels because it was applied "
            "before the division: multiply last", scaling_forgotten, scaled_before),
    Mistake("groups ignored", "experts of closed groups were chosen: only the best "
            "router.n_groups_active groups are open", groups_ignored),
    Mistake("group by its best", "a group was ranked by its single best expert: its worth is the "
            "sum of its two best", group_by_best),
    Mistake("group by its sum", "a group was ranked by all its experts: its worth is the sum of "
            "its two best only", group_by_sum, group_by_mean),
    Mistake("closed with zero", "closed experts were set to 0 and win where every open one is "
            "negative: close them with -inf", closed_with_zero),
    Mistake("groups interleaved", "the groups take every n-th expert: they are neighbours, "
            "E / n_groups in a row", groups_interleaved),
    Mistake("groups without bias", "the groups were ranked without the bias: it counts for groups "
            "as for experts", groups_without_bias),
    Mistake("one group", "only one group was opened: router.n_groups_active of them are",
            one_group),
    Mistake("one expert repeated", "the best expert was taken k times: the k experts of a token "
            "differ, topk gives that", best_repeated),
    Mistake("detached", "the values are right, but no gradient reaches the logits: the weights "
            "must not be detached, or the router never learns", detached),
)  # fmt: skip

BIASED_ROUTING = Exercise(
    name="biased_routing",
    module="12",
    prompt="Choose by score plus bias, within the best groups, and weigh without the bias.",
    signature=("router_logits", "k", "router", "bias"),
    reference=route,
    stub=BIASED_STUB,
    make_cases=biased_cases,
    run=run_biased,
    axes={
        "how often each expert is chosen": "N E",
        "weights by expert": "N E",
        "gradient of the logits": "N E",
    },
    properties={"the k experts of a token differ": distinct,
                "the weights of a token sum to router.scaling": sums_to_scaling},
    equivalents={"by sorting": by_sorting, "token by token": token_by_token},
    mistakes=BIASED_MISTAKES,
)  # fmt: skip


# capacity: which slots find a place in buffers of fixed size

CAPACITY_STUB = '''\
def within_capacity(chosen, n_experts, capacity, real):
    """chosen (N, k) to a mask (N, k): True where the slot finds a place at its expert."""
    # Each expert has `capacity` places. Tokens are served in order, each its k choices in order.
    # Where real (N,) is False the token is padding: it takes no place and gets none.
    # A slot that comes too late is dropped; the token's other slots still stand.
    ...


within_capacity = check("capacity", within_capacity).use
'''


def capacity_cases() -> list[Case]:
    sizes = dict(N=13, k=2)
    chosen = normal(21, 13, 5).topk(2, dim=-1).indices
    crowd = (normal(22, 13, 5) + torch.tensor([3.0, 1.5, 0, 0, 0])).topk(2, dim=-1).indices
    every, some = torch.ones(13, dtype=torch.bool), whole(23, 3, 13) > 0
    some[:2] = False
    return [
        Case("no padding", sizes, dict(chosen=crowd, n_experts=5, capacity=4, real=every)),
        Case("padding, some of it in front", sizes,
             dict(chosen=crowd, n_experts=5, capacity=3, real=some)),
        Case("places for all", sizes, dict(chosen=chosen, n_experts=5, capacity=13, real=some)),
    ]  # fmt: skip


def run_capacity(attempt, chosen, n_experts: int, capacity: int, real) -> dict:
    kept = named(attempt(chosen, n_experts, capacity, real), "kept")["kept"]
    return {"kept": kept}


def no_expert_overflows(outputs: dict, case: Case) -> bool:
    load = case.inputs["chosen"][outputs["kept"].bool()].bincount(minlength=5)
    return load.max().item() <= case.inputs["capacity"]


def every_place_is_used(outputs: dict, case: Case) -> bool:
    chosen, real = case.inputs["chosen"], case.inputs["real"]
    asked = chosen[real].flatten().bincount(minlength=5).clamp(max=case.inputs["capacity"])
    return torch.equal(chosen[outputs["kept"].bool()].bincount(minlength=5), asked)


def one_by_one(chosen, n_experts, capacity, real=None, first=0):
    """The queue as a loop."""
    kept = torch.zeros(chosen.shape, dtype=torch.bool)
    load = [first] * n_experts
    for token, experts in enumerate(chosen.tolist()):
        for slot, e in enumerate(experts):
            if real is None or real[token]:
                kept[token, slot] = load[e] < capacity
                load[e] += 1
    return kept


def loop_over_experts(chosen, n_experts, capacity, real):
    """Right: for each expert the first places of its own queue."""
    kept = torch.zeros_like(chosen, dtype=torch.bool).flatten()
    wanted = torch.where(real[:, None], chosen, -1).flatten()
    for e in range(n_experts):
        kept[torch.where(wanted == e)[0][:capacity]] = True
    return kept.view_as(chosen)


def padding_takes_places(chosen, n_experts, capacity, real):
    return one_by_one(chosen, n_experts, capacity) & real[:, None]


def padding_is_served(chosen, n_experts, capacity, real):
    return one_by_one(chosen, n_experts, capacity)


def padding_kept_free(chosen, n_experts, capacity, real):
    return one_by_one(chosen, n_experts, capacity, real) | ~real[:, None]


def one_place_less(chosen, n_experts, capacity, real):
    return one_by_one(chosen, n_experts, capacity, real, first=1)


def one_place_more(chosen, n_experts, capacity, real):
    return one_by_one(chosen, n_experts, capacity + 1, real)


def last_come(chosen, n_experts, capacity, real):
    return one_by_one(chosen.flip(0), n_experts, capacity, real.flip(0)).flip(0)


def first_choices_first(chosen, n_experts, capacity, real):
    columns = chosen.T.reshape(-1, 1)
    kept = one_by_one(columns, n_experts, capacity, real.repeat(chosen.shape[1]))
    return kept.view(chosen.shape[1], -1).T


def each_choice_alone(chosen, n_experts, capacity, real):
    columns = [one_by_one(column[:, None], n_experts, capacity, real) for column in chosen.T]
    return torch.cat(columns, dim=1)


def whole_token(chosen, n_experts, capacity, real):
    return one_by_one(chosen, n_experts, capacity, real).all(-1, keepdim=True).expand(-1, 2).clone()


def any_slot(chosen, n_experts, capacity, real):
    return one_by_one(chosen, n_experts, capacity, real).any(-1, keepdim=True).expand(-1, 2).clone()


def one_queue(chosen, n_experts, capacity, real):
    wants = real[:, None].expand_as(chosen).flatten()
    place = wants.long().cumsum(0)
    return (wants & (place <= capacity * n_experts)).view_as(chosen)


def dropped(chosen, n_experts, capacity, real):
    return ~one_by_one(chosen, n_experts, capacity, real)


def full_experts_closed(chosen, n_experts, capacity, real):
    load = chosen[real].flatten().bincount(minlength=n_experts)
    return (load <= capacity)[chosen] & real[:, None]


CAPACITY_MISTAKES = (
    Mistake("padding takes places", "padding was left out only after the places were given away: "
            "it must not stand in the queue at all", padding_takes_places),
    Mistake("padding is served", "padding was served: tokens where real is False take no place "
            "and get none", padding_is_served),
    Mistake("padding kept", "padding is marked as kept: it takes no place, and it gets none",
            padding_kept_free),
    Mistake("one place less", "each expert serves one slot less than its capacity: the first in "
            "a queue has place 1, or compare with < from 0", one_place_less),
    Mistake("one place more", "each expert serves one slot more than its capacity: count from 1 "
            "with <=, or from 0 with <", one_place_more),
    Mistake("last come", "the last tokens were served first: the queue is in the order of the "
            "tokens", last_come),
    Mistake("first choices first", "all first choices were served before any second one: here a "
            "token's k choices stand together in the queue", first_choices_first),
    Mistake("each choice alone", "first and second choices have queues of their own: an expert has "
            "one set of places for both", each_choice_alone),
    Mistake("whole token", "a token lost all its slots because one was dropped: the others still "
            "stand", whole_token),
    Mistake("any slot", "a token keeps all its slots because one found a place: each slot needs "
            "its own", any_slot),
    Mistake("one queue", "all experts share one queue: each has `capacity` places of its own",
            one_queue),
    Mistake("dropped", "True marks the dropped slots (and padding): it should mark those that "
            "found a place", dropped),
    Mistake("full experts closed", "an expert with too many slots drops all of them: it serves the "
            "first `capacity`", full_experts_closed),
)  # fmt: skip

CAPACITY = Exercise(
    name="capacity",
    module="12",
    prompt="Give out an expert's places first come, first served, and none to padding.",
    signature=("chosen", "n_experts", "capacity", "real"),
    reference=keep_within_capacity,
    stub=CAPACITY_STUB,
    make_cases=capacity_cases,
    run=run_capacity,
    axes={"kept": "N k"},
    properties={"no expert serves more than its capacity": no_expert_overflows,
                "no place stays empty that a token asked for": every_place_is_used},
    equivalents={"loop over experts": loop_over_experts, "one by one": one_by_one},
    mistakes=CAPACITY_MISTAKES,
)  # fmt: skip
