"""`python -m course_lib`: one model, built, traced, trained a step and run, in a few seconds.

Every number below is computed by this very run; a check that fails is named and exits 1.
"""

import math
import sys

import torch

from course_lib import Config, ModernDecoder, losses, new_caches
from course_lib.trace import Trace, expert_usage, trace, trace_block
from course_lib.zoo.counts import cache_bytes, count_parameters, numel

CACHE_TOLERANCE = 1e-5
SPLITS = ([8], [1] * 8, [3, 2, 3], [7, 1])


class Report:
    """Prints lines and keeps what was checked."""

    def __init__(self):
        self.failed: list[str] = []

    def section(self, title: str):
        print(f"\n{title}\n{'-' * len(title)}")

    def line(self, label: str, value):
        print(f"  {label:<34} {value}")

    def check(self, name: str, ok: bool):
        if not ok:
            self.failed.append(name)

    def close(self) -> int:
        if self.failed:
            print(f"\nFAILED: {'; '.join(self.failed)}")
            return 1
        print("\nall checks passed")
        return 0


def report_parameters(report: Report, model: ModernDecoder):
    count = count_parameters(model.cfg)
    report.section("model")
    report.line("parameters, total", f"{count.total:,}")
    report.line("routed experts", f"{count.routed:,} ({count.routed / count.total:.1%})")
    report.line("shared experts", f"{count.shared:,}")
    report.line("active per token", f"{count.active:,} ({count.active / count.total:.1%})")
    report.line("cache per token, bf16", f"{cache_bytes(model.cfg, 1):,} bytes")
    report.check("counted parameters = built parameters", count.total == numel(model))


def report_training_step(report: Report, cfg: Config):
    """The step of the course document: targets independent of the inputs."""
    torch.manual_seed(0)
    model = ModernDecoder(cfg)
    ids = torch.randint(cfg.vocab_size, (2, 16))
    logits, router_logits = model(ids)
    report.section("forward pass")
    report.line("ids", tuple(ids.shape))
    report.line("logits", tuple(logits.shape))
    report.line("router logits of each MoE layer", [tuple(r.shape) for r in router_logits])
    targets = torch.randint(cfg.vocab_size, (2, 16))
    cross_entropy, aux = losses(model, ids, targets)
    (cross_entropy + aux).backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    real_objective, _ = losses(model, ids)
    report.section("training step")
    report.line("cross-entropy, random targets", f"{cross_entropy.item():.4f} nats a token")
    report.line("ln(vocab_size)", f"{math.log(cfg.vocab_size):.4f}")
    report.line("balance loss, all MoE layers", f"{aux.item():.4f}")
    report.line("gradient norm of their sum", f"{grad_norm.item():.3f}")
    report.line("cross-entropy, next token", f"{real_objective.item():.4f} nats a token")
    near = abs(cross_entropy.item() - math.log(cfg.vocab_size)) < 0.5
    report.line("the same without our init", f"{loss_without_init(cfg):.1f} nats a token")
    report.check("the first loss is near ln V", near)
    report.check("the gradient is finite", bool(grad_norm.isfinite()))
    report_generation(report, model)


def loss_without_init(cfg: Config) -> float:
    """The first loss when torch's default weights stay: a broken initialisation."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = ModernDecoder(cfg, init=None)
        ids, targets = (torch.randint(cfg.vocab_size, (2, 16)) for _ in range(2))
        return losses(model, ids, targets)[0].item()


def report_generation(report: Report, model: ModernDecoder):
    prompt = torch.randint(model.cfg.vocab_size, (1, 5))
    out = model.generate(prompt, max_new_tokens=10)
    report.section("generation")
    report.line("prompt", prompt.tolist())
    report.line("prompt and continuation", tuple(out.shape))
    report.check("the prompt is kept", torch.equal(out[:, :5], prompt))
    report.check("ten tokens are added", out.shape == (1, 15))
    torch.manual_seed(1)
    report_cache(report, model, torch.randint(model.cfg.vocab_size, (1, 8)))


def report_cache(report: Report, model: ModernDecoder, ids: torch.Tensor):
    with torch.no_grad():
        whole, _ = model(ids)
    report.section("cached against uncached")
    for split in SPLITS:
        gap = (cached_logits(model, ids, split) - whole).abs().max().item()
        ok = gap < CACHE_TOLERANCE
        shown = f"< {CACHE_TOLERANCE:g} at every position: {ok}"
        report.line(f"chunks {split}", shown)
        report.check(f"cached = uncached for chunks {split}", ok)


@torch.no_grad()
def cached_logits(model: ModernDecoder, ids: torch.Tensor, split: list[int]):
    """Logits of every position, the prompt fed through the caches in chunks."""
    caches, chunks = new_caches(model), ids.split(split, dim=1)
    return torch.cat([model(c, caches, caches[0].length)[0] for c in chunks], dim=1)


def report_trace(report: Report, cfg: Config):
    torch.manual_seed(0)
    model = ModernDecoder(cfg)
    ids = torch.randint(cfg.vocab_size, (1, 6))
    run = trace(model, ids)
    report.section("shape trace")
    for label, name in trace_rows(model):
        report.line(label, run[name].shape)
    T, H, H_kv = ids.shape[1], cfg.n_heads, cfg.n_kv_heads
    first = run.under("blocks.0.attn")
    report.check("K has H_kv heads", first["k_rotated"].shape == (1, H_kv, T, cfg.d_head))
    report.check("scores are H squares", first["scores"].shape == (1, H, T, T))
    weights = first["weights"].value.sum(-1)
    report.check("attention weights sum to 1", bool(torch.allclose(weights, weights * 0 + 1)))
    if cfg.n_moe_layers:
        report_usage(report, model, run)


def trace_rows(model: ModernDecoder) -> list[tuple[str, str]]:
    """Label and stage name of the layout's rows, for the first MoE block (else the last)."""
    layer = next((i for i, b in enumerate(model.blocks) if b.is_moe), len(model.blocks) - 1)
    b = f"blocks.{layer}."
    router = [
        ("  router logits", b + "ffn.router_logits"),
        (f"  top-{model.cfg.n_experts_active} indices", b + "ffn.chosen"),
    ]
    is_moe = model.blocks[layer].is_moe
    return [
        ("token ids", "ids"),
        ("embedding", "embed"),
        (f"block {layer}, after RMSNorm 1", b + "norm1"),
        ("  Q", b + "attn.q"),
        ("  K, cached", b + "attn.k"),
        ("  V, cached", b + "attn.v"),
        ("  Q after QK-Norm + RoPE", b + "attn.q_rotated"),
        ("  K after QK-Norm + RoPE", b + "attn.k_rotated"),
        ("  K expanded, not cached", b + "attn.k_expanded"),
        ("  V expanded, not cached", b + "attn.v_expanded"),
        ("  scores", b + "attn.scores"),
        ("  output of the heads", b + "attn.heads"),
        ("  concatenated", b + "attn.concat"),
        ("  after W_o", b + "attn"),
        ("after residual add", b + "after_attn"),
        ("after RMSNorm 2", b + "norm2"),
        *(router if is_moe else []),
        ("  MoE output" if is_moe else "  FFN output", b + "ffn"),
        ("after residual add", b + "after_ffn"),
        ("final logits", "lm_head"),
    ]


def report_usage(report: Report, model: ModernDecoder, run: Trace):
    cfg = model.cfg
    slots = run["ids"].value.numel() * cfg.n_experts_active
    report.section(f"expert usage over {slots} slots")
    for layer, block in enumerate(model.blocks):
        if block.is_moe:
            usage = expert_usage(run[f"blocks.{layer}.ffn.chosen"].value, cfg.n_experts)
            report.line(f"block {layer}, in the forward pass", usage)
            report.check(f"block {layer} fills {slots} slots", sum(usage) == slots)
    layer = cfg.first_k_dense
    cos, sin = model.rope(torch.arange(run["ids"].shape[1]))
    alone = trace_block(model.blocks[layer], run["embed"].value, cos, sin)
    usage = expert_usage(alone["ffn.chosen"].value, cfg.n_experts)
    report.line(f"block {layer}, fed the embeddings", usage)
    print("  (fed the embeddings: the blocks before it are skipped, so no real forward pass)")
    report.check("the lone block fills the slots", sum(usage) == slots)


def main(cfg: Config | None = None) -> int:
    cfg = Config() if cfg is None else cfg
    report = Report()
    torch.set_num_threads(1)
    print(f"course_lib report, computed by this run\n{cfg}")
    torch.manual_seed(0)
    report_parameters(report, ModernDecoder(cfg))
    report_trace(report, cfg)
    report_training_step(report, cfg)
    return report.close()


if __name__ == "__main__":
    sys.exit(main())
