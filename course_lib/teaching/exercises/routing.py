"""Exercises on mixtures of experts: which experts a token goes to, and how their work is added."""

import torch
from torch import Tensor

from course_lib.model import Config, MoE

from ..exercise import Case, Exercise, Mistake, build, gradient, named, same
from .inputs import normal, weights_of

# top_k_routing: the forward pass of MoE

STUB = '''\
class MyMoE(MoE):
    def forward(self, x):
        """x (B, T, D) to out (B, T, D) and router_logits (N, E), with N = B T tokens."""
        # 1. One list of all tokens, flat (N, D); self.gate gives router_logits (N, E).
        # 2. Each token takes its self.top_k largest logits; softmax over these: the weights.
        # 3. Each of self.experts runs on its own tokens; index_add_ weight * result.
        # 4. Add every one of self.shared, then give the result the shape of x.
        ...


MyMoE = check("top_k_routing", MyMoE).use
'''


def routing_cases() -> list[Case]:
    sizes = dict(B=2, T=7, N=14, D=24, E=6, k=3)
    cfg = Config(d_model=24, d_expert=16, n_experts=6, n_experts_active=3, n_shared_experts=2)
    state = weights_of(MoE(cfg), seed=1)
    first = {n: state[f"experts.0.{n.split('.', 2)[2]}"] for n in state if n.startswith("experts")}
    few = dict(sizes, B=1, T=2, N=2)
    return [
        Case("14 tokens", sizes, dict(cfg=cfg, state=state, x=normal(2, 2, 7, 24))),
        Case("2 tokens, too few for all experts", few, dict(cfg=cfg, state=state,
                                                            x=normal(3, 1, 2, 24))),
        Case("experts that are all alike", sizes, dict(cfg=cfg, state={**state, **first},
                                                       x=normal(4, 2, 7, 24))),
    ]  # fmt: skip


def run_routing(attempt, cfg: Config, state: dict, x: Tensor) -> dict:
    moe = build(attempt, state, cfg)
    outputs = named(moe(x), "out", "router_logits")
    order = torch.arange(x.shape[0] * x.shape[1] - 1, -1, -1)
    shuffled = x.flatten(0, 1)[order].view(x.shape[1], x.shape[0], -1)  # and another B and T
    with torch.no_grad():
        again = named(moe(shuffled), "out", "router_logits")["out"]
        one = moe.experts[0](x) + sum(expert(x) for expert in moe.shared)
    return outputs | {
        "out of the tokens in another order": again.flatten(0, -2)[order],
        "one expert, and the shared ones": one,
        "gradient of the gate": gradient(outputs["out"], moe.gate.weight),
    }


def alone(outputs: dict, case: Case) -> bool:
    return same(
        outputs["out"].detach().flatten(0, 1), outputs["out of the tokens in another order"], 1e-4
    )


def weights_sum_to_one(outputs: dict, case: Case) -> bool:
    if "alike" not in case.label:
        return True
    return same(outputs["out"].detach(), outputs["one expert, and the shared ones"], 1e-4)


class StepByStep(MoE):
    """The library's layer with a method for each step, equal to it; a mistake overrides one."""

    def forward(self, x: Tensor):
        flat = x.flatten(0, -2)
        router_logits = self.gate(flat)
        weights, chosen = self.choose(router_logits)
        out = self.add_shared(self.combine(flat, weights, chosen), flat)
        return out.view_as(x), router_logits

    def choose(self, logits: Tensor):
        best, chosen = logits.topk(self.top_k, dim=-1)
        return best.softmax(-1), chosen

    def combine(self, flat: Tensor, weights: Tensor, chosen: Tensor):
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            out.index_add_(0, token, self.run_expert(expert, flat[token], weights[token, slot]))
        return out

    def run_expert(self, expert, rows: Tensor, weight: Tensor):
        return weight.unsqueeze(-1) * expert(rows)

    def add_shared(self, out: Tensor, flat: Tensor):
        return out + sum(expert(flat) for expert in self.shared)


class EveryExpertOnEveryToken(StepByStep):
    """Right: all experts on all tokens, with weight 0 where an expert was not chosen."""

    def combine(self, flat, weights, chosen):
        dense = torch.zeros(len(flat), len(self.experts)).scatter(1, chosen, weights)
        ran = torch.stack([expert(flat) for expert in self.experts], dim=1)  # (N, E, D)
        return torch.einsum("ne,ned->nd", dense, ran)


class RenormalisedSoftmax(StepByStep):
    """Right: softmax over all, then divided by the sum of the chosen."""

    def choose(self, logits):
        weights, chosen = logits.softmax(-1).topk(self.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen


class SlotByTokenOrder(StepByStep):
    """Right: one slot after the other, each token alone."""

    def combine(self, flat, weights, chosen):
        return torch.stack([
            sum(w * self.experts[e](row) for w, e in zip(ws, es.tolist(), strict=True))
            for row, ws, es in zip(flat, weights, chosen, strict=True)
        ])  # fmt: skip


class SoftmaxOverAll(StepByStep):
    def choose(self, logits):
        return logits.softmax(-1).topk(self.top_k, dim=-1)


class RawLogits(StepByStep):
    def choose(self, logits):
        return logits.topk(self.top_k, dim=-1)


class SoftmaxTwice(StepByStep):
    def choose(self, logits):
        best, chosen = logits.softmax(-1).topk(self.top_k, dim=-1)
        return best.softmax(-1), chosen


class SoftmaxOverTokens(StepByStep):
    def choose(self, logits):
        best, chosen = logits.topk(self.top_k, dim=-1)
        return best.softmax(0), chosen


class EqualWeights(StepByStep):
    def choose(self, logits):
        best, chosen = logits.topk(self.top_k, dim=-1)
        return torch.full_like(best, 1 / self.top_k), chosen


class NoWeights(StepByStep):
    def run_expert(self, expert, rows, weight):
        return expert(rows)


class WeightsDetached(StepByStep):
    def choose(self, logits):
        weights, chosen = super().choose(logits)
        return weights.detach(), chosen


class SmallestLogits(StepByStep):
    def choose(self, logits):
        best, chosen = logits.topk(self.top_k, dim=-1, largest=False)
        return best.softmax(-1), chosen


class OneExpert(StepByStep):
    def choose(self, logits):
        best, chosen = logits.max(-1, keepdim=True)
        return best.softmax(-1), chosen


class FirstSlotsWeight(StepByStep):
    def combine(self, flat, weights, chosen):
        return super().combine(flat, weights[:, :1].expand_as(weights), chosen)


class WeightsInsideTheExpert(StepByStep):
    def run_expert(self, expert, rows, weight):
        return expert(weight.unsqueeze(-1) * rows)


class RepeatedIndices(StepByStep):
    """out[token] += v with every slot at once: each token is there k times."""

    def slots(self, weights, chosen):
        """(token, expert, weight) of all N k slots."""
        token = torch.arange(len(chosen)).repeat_interleave(self.top_k)
        return token, chosen.flatten(), weights.flatten()

    def combine(self, flat, weights, chosen):
        token, expert, weight = self.slots(weights, chosen)
        ran = torch.stack([self.experts[e](flat[t]) for t, e in zip(token, expert, strict=True)])
        out = torch.zeros_like(flat)
        out[token] += weight.unsqueeze(-1) * ran
        return out


class RepeatedIndicesSorted(RepeatedIndices):
    def slots(self, weights, chosen):
        order = chosen.flatten().argsort(stable=True)
        return tuple(part[order] for part in super().slots(weights, chosen))


class Overwritten(StepByStep):
    def combine(self, flat, weights, chosen):
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            out[token] = self.run_expert(expert, flat[token], weights[token, slot])
        return out


class ExpertOrder(StepByStep):
    """The results stay in the order in which the experts ran."""

    def combine(self, flat, weights, chosen):
        parts = []
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            parts.append(self.run_expert(expert, flat[token], weights[token, slot]))
        return torch.cat(parts).view(len(flat), self.top_k, -1).sum(1)


class NoShared(StepByStep):
    def add_shared(self, out, flat):
        return out


class OneShared(StepByStep):
    def add_shared(self, out, flat):
        return out + self.shared[0](flat)


class SharedMean(StepByStep):
    def add_shared(self, out, flat):
        return out + sum(expert(flat) for expert in self.shared) / len(self.shared)


class Residual(StepByStep):
    def add_shared(self, out, flat):
        return super().add_shared(out, flat) + flat


class PerSequence(StepByStep):
    """One choice for all tokens of a row, from their mean logits."""

    def forward(self, x):
        router_logits = self.gate(x)
        mean = router_logits.mean(1, keepdim=True).expand_as(router_logits).flatten(0, 1)
        weights, chosen = self.choose(mean)
        flat = x.flatten(0, 1)
        out = self.add_shared(self.combine(flat, weights, chosen), flat)
        return out.view_as(x), router_logits.flatten(0, 1)


class Probabilities(StepByStep):
    def forward(self, x):
        out, router_logits = super().forward(x)
        return out, router_logits.softmax(-1)


class LogitsByRow(StepByStep):
    def forward(self, x):
        out, router_logits = super().forward(x)
        return out, router_logits.view(*x.shape[:2], -1)


class Flat(StepByStep):
    def forward(self, x):
        out, router_logits = super().forward(x)
        return out.flatten(0, 1), router_logits


ROUTING_MISTAKES = (
    Mistake("softmax over all", "softmax was taken over all experts and not renormalised: the "
            "weights of the chosen sum to less than 1 and the layer shrinks its output",
            SoftmaxOverAll),
    Mistake("raw logits", "the chosen logits themselves were used as weights: take their softmax, "
            "weights are positive and sum to 1", RawLogits),
    Mistake("softmax twice", "softmax was taken twice, over all and again over the chosen "
            "probabilities: the weights become nearly equal; take it once, over the chosen logits",
            SoftmaxTwice),
    Mistake("softmax over tokens", "softmax ran over the tokens (dim 0), not over the chosen "
            "experts (dim -1): a token's weights then depend on the rest of the batch",
            SoftmaxOverTokens),
    Mistake("equal weights", "all chosen experts count the same: the router's weights are missing, "
            "so the gate gets no gradient", EqualWeights),
    Mistake("no weights", "the experts' results were added without their weights: the sum is k "
            "times too large and the gate gets no gradient", NoWeights),
    Mistake("weights detached", "the values are right, but no gradient reaches the gate: the "
            "weights were detached, so the router would never learn", WeightsDetached),
    Mistake("smallest logits", "the k smallest logits were chosen: topk takes the largest, a sort "
            "is ascending unless told otherwise", SmallestLogits),
    Mistake("one expert", "only the best expert of each token ran: top-k takes self.top_k of them",
            OneExpert),
    Mistake("first slot's weight", "every chosen expert got the weight of the first slot: index "
            "weights by token and slot, weights[token, slot]", FirstSlotsWeight),
    Mistake("weights inside", "the weight multiplied the expert's input: SwiGLU is not linear, so "
            "it must multiply the result", WeightsInsideTheExpert),
    Mistake("repeated indices", "out[token] += ... with repeated indices keeps one of a token's k "
            "results and loses the others: use index_add_", RepeatedIndices,
            RepeatedIndicesSorted, Overwritten),
    Mistake("expert order", "the results stand in the order of the experts, not of the tokens: "
            "they belong back to the tokens they came from (index_add_ by token)", ExpertOrder),
    Mistake("no shared experts", "the shared experts are missing: every token goes to them too, "
            "with weight 1", NoShared),
    Mistake("one shared expert", "only the first shared expert was added: self.shared may hold "
            "several", OneShared),
    Mistake("shared mean", "the shared experts were averaged: they are added, each with weight 1",
            SharedMean),
    Mistake("residual", "x itself was added to the result: the residual connection belongs to the "
            "block around the layer, and would be there twice", Residual),
    Mistake("per sequence", "one choice was made for all tokens of a row: routing is per token, "
            "each of the N = B T tokens chooses alone", PerSequence),
    Mistake("probabilities", "router_logits are probabilities: return the gate's logits before "
            "softmax, the balance loss takes the softmax itself", Probabilities),
    Mistake("logits by row", "router_logits are (B, T, E): the router knows no rows, return them "
            "for one list of tokens, (N, E)", LogitsByRow),
    Mistake("flat", "the result is still one list of tokens, (N, D): give it the shape of x again",
            Flat),
)  # fmt: skip

TOP_K_ROUTING = Exercise(
    name="top_k_routing",
    module="16",
    prompt="Send each token to its k best experts and add their weighted results.",
    signature=("x",),
    reference=MoE,
    stub=STUB,
    make_cases=routing_cases,
    run=run_routing,
    axes={
        "out": "B T D",
        "router_logits": "N E",
        "out of the tokens in another order": "N D",
        "one expert, and the shared ones": "B T D",
        "gradient of the gate": "E D",
    },
    properties={
        "a token's result does not depend on its neighbours or on its row": alone,
        "the k weights of a token sum to 1": weights_sum_to_one,
    },
    equivalents={
        "step by step": StepByStep,
        "every expert on every token": EveryExpertOnEveryToken,
        "renormalised softmax": RenormalisedSoftmax,
        "token by token": SlotByTokenOrder,
    },
    mistakes=ROUTING_MISTAKES,
)
