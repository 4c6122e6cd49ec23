"""Router explorable: who gets the tokens of a fresh router, and why six tokens show no collapse."""

import math

import torch
from torch import Tensor, nn

from course_lib.model import Config, GroupedQueryAttention, RMSNorm, RotaryTable, Router, route
from course_lib.model.decoder import Block, init_weights
from course_lib.model.parts import ROUTERS
from course_lib.teaching.explore import Choice, Explorable, Slider
from course_lib.teaching.memory import Results
from course_lib.teaching.panels import Bars, Heat, Lines, Note
from course_lib.trace import expert_usage

EXPERTS = (2, 4, 8, 16, 32, 64)
TOKENS, BATCH = 128, 16  # at most
TEXTS, PREFIX = 64, 8  # further texts that the same router is asked about
SHOWN_TOKENS = 48
FEW_TOKENS = 64  # up to here the finding warns of reading collapse from them


class RouterOfBlock1(nn.Module):
    """The decoder up to the router of its first MoE block: a dense block, then attention.

    ids (B, T) to what the router sees (B, T, D)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.rope = RotaryTable(cfg)
        self.embed = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.block = Block(cfg, layer=0)
        self.norm1, self.norm2 = RMSNorm(cfg.d_model), RMSNorm(cfg.d_model)
        self.attn = GroupedQueryAttention(cfg, layer=1)
        self.gate = nn.Linear(cfg.d_model, max(EXPERTS), bias=False)  # E experts: its first E rows

    @torch.no_grad()
    def forward(self, ids: Tensor) -> Tensor:
        cos, sin = self.rope(torch.arange(ids.shape[1]))
        x, _ = self.block(self.embed(ids), cos, sin)
        return self.norm2(x + self.attn(self.norm1(x), cos, sin))


def draw_router(seed: int) -> RouterOfBlock1:
    """Fresh weights as ModernDecoder draws them, without torch's own first draw."""
    with torch.device("meta"):
        part = RouterOfBlock1(Config(n_layers=2))
    part.to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        part.apply(init_weights)
    for module in part.modules():
        if isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
    return part


def random_ids(seed: int, batch: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(Config().vocab_size, (batch, tokens), generator=generator)


def mean_cosine(seen: Tensor) -> tuple[float | None, float | None]:
    """Mean cosine of router inputs (B, T, D): pairs within a text, pairs of different texts.

    The sum of all pairs is the squared length of the sum of unit vectors. None without pairs."""
    B, T, _ = seen.shape
    unit = nn.functional.normalize(seen, dim=-1)
    inside = unit.sum(1).pow(2).sum(-1)  # (B,), T of it from tokens with themselves
    everything = unit.sum((0, 1)).pow(2).sum()
    within = (inside.sum() - B * T) / (B * T * (T - 1)) if T > 1 else None
    between = (everything - inside.sum()) / (B * (B - 1) * T * T) if B > 1 else None
    return tuple(None if value is None else value.item() for value in (within, between))


def share_taken_by_one(chosen: Tensor, n_experts: int) -> list[float]:
    """Share of texts in which some expert takes all of the first m tokens, m = 1 to M.

    chosen (texts, M, k) indices to M shares."""
    takes = nn.functional.one_hot(chosen, n_experts).sum(2)  # (texts, M, E), 0 or 1
    takes_all = takes.cumprod(1).amax(2)
    return takes_all.double().mean(0).tolist()


def independent_share(n_experts: int, k: int, m: int) -> float:
    """The same share if each of m tokens drew its k of E experts by lot.

    Inclusion and exclusion over the sets of j experts that are in all m draws:
    sum over j = 1..k of (-1)^(j+1) C(E, j) (C(E-j, k-j) / C(E, k))^m. Module 12."""
    draws = math.comb(n_experts, k)
    terms = (
        (-1) ** (j + 1) * math.comb(n_experts, j) * (math.comb(n_experts - j, k - j) / draws) ** m
        for j in range(1, k + 1)
    )
    return min(1.0, max(0.0, sum(terms)))


class RouterLab:
    """Weights are drawn once a seed, tokens run once a (seed, batch, tokens)."""

    def __init__(self):
        self.routers, self.inputs = Results(most=2), Results(most=3)

    def seen(self, seed: int, batch: int, tokens: int) -> Tensor:
        router = self.routers.get(seed, lambda: draw_router(seed))
        key = (seed, batch, tokens)
        return self.inputs.get(key, lambda: router(random_ids(seed, batch, tokens)))

    def route(self, seed: int, seen: Tensor, cfg: Config) -> tuple[Tensor, Tensor]:
        """Weights and experts (B, T, k) for router inputs (B, T, D)."""
        gate = self.routers.get(seed, lambda: draw_router(seed)).gate.weight[: cfg.n_experts]
        with torch.no_grad():
            logits = seen.flatten(0, 1) @ gate.T
        weights, chosen = route(logits, cfg.n_experts_active, cfg.router)
        shape = (*seen.shape[:2], cfg.n_experts_active)
        return weights.view(shape), chosen.view(shape)

    def compute(self, experts: int, top_k: int, kind: str, tokens: int, batch: int, seed: int):
        cfg = Config(n_experts=experts, n_experts_active=top_k, router=Router(kind))
        seen = self.seen(seed, batch, tokens)
        weights, chosen = self.route(seed, seen, cfg)
        others = self.seen(seed, TEXTS, PREFIX)
        _, chosen_there = self.route(seed, others, cfg)
        within, between = mean_cosine(seen)
        return {
            "usage": expert_usage(chosen, experts),
            "usage_of_others": expert_usage(chosen_there, experts),
            "weights": weights[0, :SHOWN_TOKENS],
            "chosen": chosen[0, :SHOWN_TOKENS],
            "within": within,
            "between": mean_cosine(others)[1] if between is None else between,
            "taken_by_one": share_taken_by_one(chosen_there, experts),
            "by_lot": [independent_share(experts, top_k, m + 1) for m in range(PREFIX)],
        }


def weights_by_expert(data: dict, experts: int) -> Tensor:
    """Weights of the first text's tokens as (E, T), 0 where an expert was not chosen."""
    weights, chosen = data["weights"], data["chosen"]
    table = torch.zeros(len(chosen), experts)
    return table.scatter(1, chosen, weights.float()).T


def view(data: dict, experts: int):
    return [
        [usage_panel(data, experts), chance_panel(data)],
        [weights_panel(data, experts), notes_panel(data)],
    ]


def usage_panel(data: dict, experts: int) -> Bars:
    usage, slots = data["usage"], sum(data["usage"])
    busiest = max(range(experts), key=usage.__getitem__)
    even = slots / experts
    return Bars(
        usage,
        [str(e) for e in range(experts)],
        title=f"Expert {busiest} takes {usage[busiest]} of {slots} slots",
        xlabel="expert",
        ylabel="slots",
        roles=[f"expert {e}" for e in range(experts)],
        reference=even,
        reference_label=f"even: {even:.4g}",
        width=1.2,
    )


def chance_panel(data: dict) -> Lines:
    seen, lot = data["taken_by_one"][5], data["by_lot"][5]
    return Lines(
        range(1, PREFIX + 1),
        {"this router": data["taken_by_one"], "by lot": data["by_lot"]},
        title=f"One expert takes all 6: {seen:.1%}, by lot {lot:.2%}",
        xlabel="first m tokens of a text",
        ylabel="share of texts",
        limits=(0, 1),
        roles=["router", "stream"],
        dots=True,
    )


def weights_panel(data: dict, experts: int) -> Heat:
    total = data["weights"].sum(-1)
    low, high = total.min().item(), total.max().item()
    spread = f"to {low:.3f}" if high - low < 5e-4 else f"to between {low:.3f} and {high:.3f}"
    return Heat(
        weights_by_expert(data, experts),
        title=f"Weights of the first text: those of a token sum {spread}",
        xlabel="token t",
        ylabel="expert",
        limits=(0, 1),
        square=False,
        role="router",
        width=1.2,
    )


def notes_panel(data: dict) -> Note:
    usage, others = data["usage"], data["usage_of_others"]
    within = "one token only" if data["within"] is None else f"{data['within']:.2f}"
    lines = [
        "how alike what the router sees is (mean cosine)",
        f"  tokens of one text         {within}",
        f"  tokens of different texts  {data['between']:.2f}",
        "",
        f"busiest expert               {max(usage) / sum(usage):.1%}",
        f"  over {TEXTS} other texts        {max(others) / sum(others):.1%}",
        f"  even                       {1 / len(usage):.1%}",
        f"experts without a token      {usage.count(0)} of {len(usage)}",
    ]
    return Note("\n".join(lines), title="Why: tokens of one text look alike to the router")


def summary(data: dict, experts: int, tokens: int, batch: int) -> str:
    usage, others = data["usage"], data["usage_of_others"]
    alike = "" if data["within"] is None else f", inputs of a text alike by {data['within']:.2f}"
    return (
        f"{batch} x {tokens} tokens, slots {usage if experts <= 16 else max(usage)}{alike}; "
        f"{TEXTS} other texts: busiest expert {max(others) / sum(others):.1%} of the slots, "
        f"even {1 / experts:.1%}; one expert takes 6 tokens in "
        f"{data['taken_by_one'][5]:.1%} of texts, by lot {data['by_lot'][5]:.2%}"
    )


def finding(data: dict, experts: int, tokens: int, batch: int) -> str:
    usage, others = data["usage"], data["usage_of_others"]
    busiest, elsewhere = max(usage) / sum(usage), max(others) / sum(others)
    texts = "one text" if batch == 1 else f"{batch} texts"
    said = (
        f"{batch * tokens} tokens of {texts} give the busiest of {experts} experts {busiest:.1%} "
        f"of the slots; {TEXTS} other texts give theirs {elsewhere:.1%} (even: {1 / experts:.1%})."
    )
    if data["within"] is None or batch * tokens > FEW_TOKENS:
        return said
    return (
        f"{said} It shows no collapse: the tokens of one text look alike to the router "
        f"(mean cosine {data['within']:.2f})."
    )


def code(experts: int, top_k: int, kind: str) -> str:
    sizes = f"n_experts={experts}, n_experts_active={top_k}"
    return f'Config({sizes}, router=Router("{kind}"))'


def invariants(data: dict, experts: int, top_k: int, kind: str, tokens: int, batch: int):
    sums = data["weights"].sum(-1)
    chosen = data["chosen"].sort(-1).values
    falling = zip(data["taken_by_one"], data["taken_by_one"][1:], strict=False)
    return [
        ("slots = batch x tokens x k", sum(data["usage"]) == batch * tokens * top_k),
        ("no expert takes a token twice", bool((chosen.diff(dim=-1) > 0).all())),
        ("weights lie in 0..1", bool(((data["weights"] >= 0) & (data["weights"] <= 1)).all())),
        ("weights sum to 1", kind == "softmax_all" or bool(((sums - 1).abs() < 1e-5).all())),
        ("longer prefixes are taken less often", all(a >= b for a, b in falling)),
        ("one token always goes to one expert", data["taken_by_one"][0] == 1),
        ("by lot too", math.isclose(data["by_lot"][0], 1, abs_tol=1e-9)),
    ]


def router_explorable() -> Explorable:
    """Experts, top-k, length, batch, seed: usage against independence. Module 12."""
    return Explorable(
        "router",
        RouterLab().compute,
        view,
        summary,
        controls={
            "experts": Slider(8, values=EXPERTS, label="experts (E)", group="router"),
            "top_k": Slider(2, 1, 8, label="experts a token (k)", group="router"),
            "kind": Choice("softmax_selected", ROUTERS, label="weights by", group="router"),
            "tokens": Slider(
                6, 1, TOKENS, log=True, label="tokens a text (T)", group="what it sees"
            ),
            "batch": Slider(1, 1, BATCH, log=True, label="texts (B)", group="what it sees"),
            "seed": Slider(
                0, 0, 99, label="seed", help="draws weights and texts", group="what it sees"
            ),
        },
        title="Who gets the tokens of an untrained router?",
        alt=finding,
        code=code,
        invariants=invariants,
        runs="model",
        height=362,
    )
