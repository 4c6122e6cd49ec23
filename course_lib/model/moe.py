"""Mixture of experts: a router sends each token to k of E small feed-forward layers."""

import torch
from torch import Tensor, nn

from .checks import is_whole, require
from .config import Config
from .ffn import SwiGLU
from .grouped import combine_grouped
from .parts import Router
from .tap import Tap


def scores_of(router_logits: Tensor, kind: str) -> Tensor:
    """What experts are compared and weighted by: (N, E) logits to (N, E), float32."""
    logits = router_logits.float()
    if kind == "sigmoid":
        return logits.sigmoid()
    return logits if kind == "softmax_selected" else logits.softmax(-1)


def close_groups(scores: Tensor, router: Router) -> Tensor:
    """-inf for the experts outside the groups whose two best experts sum highest.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2. Module 12."""
    grouped = scores.unflatten(-1, (router.n_groups, -1))  # (N, groups, E / groups)
    best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    open_groups = best.topk(router.n_groups_active, dim=-1).indices
    closed = torch.ones_like(best, dtype=torch.bool).scatter(-1, open_groups, False)
    return grouped.masked_fill(closed.unsqueeze(-1), -torch.inf).flatten(-2)


def route(
    router_logits: Tensor,
    k: int,
    router: Router | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose k experts a token and weight them: (N, E) to weights and indices (N, k).

    The selection bias (E,) steers the choice only. Which of equal scores is chosen is
    torch's affair. Raises ValueError for k < 1 or k > E. Sources: see Router.
    Module 12."""
    E = router_logits.shape[-1]
    require(
        is_whole(k, least=1) and k <= E,
        f"k={k!r} experts a token of E={E}.",
        f"Choose 1 to {E}.",
    )
    router = Router() if router is None else router
    scores = scores_of(router_logits, router.kind)
    ranked = scores if bias is None else scores + bias
    if router.n_groups > 1:
        ranked = close_groups(ranked, router)
    chosen = ranked.topk(k, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if router.kind == "softmax_selected":
        weights = weights.softmax(-1)
    elif router.divides_by_sum():
        # k sigmoids can all round to 0, and 0 / 0 is no weight
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
    return weights * router.scaling, chosen


def combine_loop(experts: nn.ModuleList, flat: Tensor, weights: Tensor, chosen: Tensor):
    """Run each expert on its own tokens and scatter-add: the form to read. (N, D)."""
    out = torch.zeros_like(flat)
    for e, expert in enumerate(experts):
        token, slot = torch.where(chosen == e)  # none: the gradient is 0, not None
        weighted = weights[token, slot].unsqueeze(-1) * expert(flat[token])
        out.index_add_(0, token, weighted)
    return out


def combine_sorted(
    experts: nn.ModuleList, flat: Tensor, weights: Tensor, chosen: Tensor
):
    """The same sum, the N k slots sorted by expert first: each runs one slice."""
    order = chosen.flatten().argsort(stable=True)
    token = order // chosen.shape[-1]
    counts = chosen.flatten().bincount(minlength=len(experts)).tolist()
    slices = flat[token].split(counts)
    ran = torch.cat(
        [expert(rows) for expert, rows in zip(experts, slices, strict=True)]
    )
    weighted = weights.flatten()[order].unsqueeze(-1) * ran
    return torch.zeros_like(flat).index_add(0, token, weighted)


COMBINE = {"loop": combine_loop, "sorted": combine_sorted, "grouped": combine_grouped}


def experts_of(cfg: Config, n: int) -> nn.ModuleList:
    return nn.ModuleList(SwiGLU(cfg.d_model, cfg.d_expert) for _ in range(n))


class MoE(nn.Module):
    """y = sum over the k chosen experts of weight * SwiGLU_e(x), plus shared experts.

    x (B, T, D) to (out (B, T, D), router_logits (N, E)) with N = B T tokens, each
    routed alone. Sources: Shazeer et al., arXiv 1701.06538; shared experts:
    DeepSeekMoE, arXiv 2401.06066. Module 12."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.top_k, self.router = cfg.n_experts_active, cfg.router
        self.gate = nn.Linear(cfg.d_model, cfg.n_experts, bias=False)
        self.experts = experts_of(cfg, cfg.n_experts)
        self.shared = experts_of(cfg, cfg.n_shared_experts)
        biased = torch.zeros(cfg.n_experts) if cfg.router.selection_bias else None
        self.register_buffer("selection_bias", biased)
        self.see_weights, self.see_chosen = Tap("N k"), Tap("N k")
        self.see_router_logits = Tap("N E")

    def route(self, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and indices (N, k) that this layer gives to these logits."""
        return route(router_logits, self.top_k, self.router, self.selection_bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, -2)  # (N, D): routing knows no batch and no order
        router_logits = self.see_router_logits(self.gate(flat))
        weights, chosen = self.route(router_logits)
        weights, chosen = self.see_weights(weights.to(x.dtype)), self.see_chosen(chosen)
        out = COMBINE[self.router.form](self.experts, flat, weights, chosen)
        for expert in self.shared:
            out = out + expert(flat)
        return out.view_as(x), router_logits
