"""What is measured, one function a section; each returns rows for the tables."""

import statistics
import subprocess
import sys
import time

import torch

from benchmarks import peers
from benchmarks.contenders import (
    LIMIT,
    Compiled,
    Fast,
    Peer,
    Readable,
    check_equal,
    course_model,
    decoding,
    prefilling,
    token_ids,
)
from benchmarks.rounds import Contender, interleave, kernel_share, ratios
from course_lib import MoE, Router
from course_lib.serving import FastDecoder, compile_decode
from course_lib.training import compile_forward, losses

BASE = "transformers"


def rows_of(case, seconds: dict, base: str, units: float, differences, looked_into=()) -> list:
    """One row a contender: its ratio to `base`, its time a unit, its difference; for those
    `looked_into` (name to Contender) also how much of it passes inside kernels."""
    return [
        {
            "case": case,
            "form": name,
            "against": base,
            **ratios(seconds, base, name),
            "ms": statistics.median(seconds[name]) / units * 1e3,
            "difference": None if differences is None else differences[name],
            "kernels": kernel_share(looked_into[name]) if name in looked_into else None,
        }
        for name in seconds
        if name != base
    ]


def eager_ones(contenders: dict) -> dict:
    """Those whose kernels a profiler sees: a decoding program in C++ calls them by itself."""
    return {name: c for name, c in contenders.items() if name != "compiled"}


def decode(report, rounds: int) -> list[dict]:
    """Tokens behind a prompt, in every form, against transformers."""
    model = course_model()
    forms = {BASE: Peer(peers.qwen3_of(model)), "plain": Readable(model), "fast": Fast(model)}
    found = []
    for batch, new in ((1, 24), (8, 8)):
        for context in (32, 480):
            engine = compile_decode(model, batch, context + new)
            report(f"compiled batch {batch}, context {context}: {engine.compile_seconds:.0f} s")
            ids = token_ids(model, batch, context + new)
            own = forms | {"compiled": Compiled(engine)}
            contenders = {name: decoding(form, ids, context) for name, form in own.items()}
            same = check_equal(contenders, "plain", peers=(BASE,))
            seconds = interleave(contenders, rounds)
            case = f"decode, batch {batch}, context {context}"
            rows = rows_of(case, seconds, BASE, new, same, eager_ones(contenders))
            for row in rows:
                if row["form"] == "compiled":
                    row |= pays_back(engine, seconds, new)
            found += rows
    return found


def pays_back(engine, seconds: dict, new: int) -> dict:
    """After how many steps the compiled form has made up for being compiled."""
    eager, compiled = (statistics.median(seconds[name]) / new for name in ("fast", "compiled"))
    steps = engine.compile_seconds / (eager - compiled) if eager > compiled else None
    return {"compile_seconds": engine.compile_seconds, "pays_after_steps": steps}


def long_decode(report, rounds: int) -> list[dict]:
    """Decoding far into a context: 8192 tokens, the peers at their worst and best."""
    new, context = 8, 8192
    model = course_model(max_seq_len=context + new)
    ids = token_ids(model, 1, context + new)
    forms = {BASE: Peer(peers.qwen3_of(model)), "plain": Readable(model), "fast": Fast(model)}
    contenders = {name: decoding(form, ids, context) for name, form in forms.items()}
    same = check_equal(contenders, "plain", peers=(BASE,))
    seconds = interleave(contenders, rounds)
    return rows_of("decode, batch 1, context 8192", seconds, BASE, new, same, contenders)


def growth(report, rounds: int) -> list[dict]:
    """Time of a decoded token of the fast form at growing context, over a cache of any values."""
    contexts, new = (64, 256, 1024, 2048, 4096, 8192), 8
    model = course_model(max_seq_len=contexts[-1] + new)
    ids = token_ids(model, 1, new)

    def contender(context):
        decoder = FastDecoder(model, 1, context + new)
        with torch.inference_mode():
            for layer in decoder.layers:
                layer.keys.normal_()
                layer.values.normal_()

        def prepare():
            decoder.length = context

        return Contender(prepare, lambda _: [decoder.step(ids[:, t : t + 1]) for t in range(new)])

    contenders = {context: contender(context) for context in contexts}
    seconds = interleave(contenders, rounds)
    cfg = model.cfg
    per_token = 2 * cfg.n_kv_heads * cfg.d_head * cfg.n_layers * 4
    return [
        {
            "case": "growth",
            "context": context,
            "ms": statistics.median(spent) / new * 1e3,
            "cache_bytes": context * per_token,
        }
        for context, spent in seconds.items()
    ]


def prefill(report, rounds: int) -> list[dict]:
    """A whole prompt at once, to the logits behind it."""
    model = course_model()
    forms = {BASE: Peer(peers.qwen3_of(model)), "plain": Readable(model), "fast": Fast(model)}
    found = []
    for tokens in (128, 512):
        ids = token_ids(model, 1, tokens)
        engine = compile_decode(model, 1, tokens, prompt=tokens)
        own = forms | {"compiled": Compiled(engine)}
        contenders = {name: prefilling(form, ids) for name, form in own.items()}
        same = check_equal(contenders, "plain", peers=(BASE,))
        seconds = interleave(contenders, rounds)
        seen = eager_ones(contenders)
        found += rows_of(f"prefill, {tokens} tokens", seconds, BASE, 1, same, seen)
    return found


def training(report, rounds: int) -> list[dict]:
    """Forward, backward and a fused AdamW step of 8 x 128 tokens; the same optimiser for all."""
    model = course_model().train()
    peer = peers.qwen3_of(model).train()
    ids = token_ids(model, 8, 128)
    compiled = compile_forward(model)
    own = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    other = torch.optim.AdamW(peer.parameters(), lr=0.0, fused=True)

    def step(optimizer, loss):
        optimizer.zero_grad(set_to_none=True)
        loss().backward()
        optimizer.step()

    def course(forward):
        return lambda: losses(model, ids, alpha=0.0, forward=forward)[0]

    def theirs():
        return peer(ids, labels=ids, use_cache=False).loss

    runs = {
        BASE: lambda _: step(other, theirs),
        "plain": lambda _: step(own, course(model)),
        "grouped": lambda _: step(own, course(model)),
        "compiled": lambda _: step(own, course(compiled)),
    }
    forms = {"plain": "sorted", "grouped": "grouped"}
    contenders = {
        name: Contender(lambda name=name: use_form(model, forms.get(name)), run)
        for name, run in runs.items()
    }
    start = time.perf_counter()
    same = same_gradients(model, contenders, ("plain", "grouped", "compiled"))
    report(f"compiled forward and backward: {time.perf_counter() - start:.0f} s")
    seconds = interleave(contenders, max(5, rounds // 2))
    case = "training step, 8 x 128 tokens"
    return rows_of(case, seconds, BASE, 1, {BASE: None, **same}, contenders)


def use_form(model, form: str | None):
    """Let every MoE layer of `model` combine its experts in `form`."""
    for module in model.modules():
        if isinstance(module, MoE) and form is not None:
            module.router = Router(form=form)


def same_gradients(model, contenders: dict, names: tuple) -> dict:
    """Largest difference of a gradient to the first form's, as a share of the largest one."""
    found, expected = {}, None
    for name in names:
        contenders[name].prepare()
        contenders[name].run(None)
        grads = [weight.grad.clone() for weight in model.parameters()]
        expected = grads if expected is None else expected
        scale = max(b.abs().max().item() for b in expected)
        pairs = zip(grads, expected, strict=True)
        found[name] = max((a - b).abs().max().item() for a, b in pairs) / scale
        assert found[name] <= LIMIT, f"gradients of {name} differ by {found[name]}"
    return found


def experts(report, rounds: int) -> list[dict]:
    """One MoE layer, 1024 tokens forward and backward, at 8, 32 and 128 experts."""
    found = []
    for n_experts in (8, 32, 128):
        model = course_model(n_experts=n_experts, n_layers=2)
        layer = model.blocks[1].ffn
        x = torch.randn(1, 1024, model.cfg.d_model, requires_grad=True)  # as inside a model

        def prepare(form, model=model):
            use_form(model, form)
            for weight in model.parameters():
                weight.grad = None

        def run(_, layer=layer, x=x):
            layer(x)[0].square().mean().backward()

        contenders = {
            form: Contender(lambda form=form: prepare(form), run)
            for form in ("loop", "sorted", "grouped")
        }
        used = torch.nn.ModuleList([layer])
        same = same_gradients(used, contenders, ("loop", "sorted", "grouped"))
        seconds = interleave(contenders, max(5, rounds // 2))
        case = f"MoE forward + backward, {n_experts} experts"
        found += rows_of(case, seconds, "loop", 1, same, contenders)
    return found


ATTENTION = """
import sys, torch
import torch.nn.functional as F
torch.set_num_threads(1)
T, explicit = int(sys.argv[1]), sys.argv[2] == "explicit"
q, k, v = torch.randn(1, 8, T, 32), torch.randn(1, 2, T, 32), torch.randn(1, 2, T, 32)
def attend(T):
    a, b, c = q[:, :, :T], k[:, :, :T], v[:, :, :T]
    if not explicit:
        return F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)
    b, c = b.repeat_interleave(4, 1), c.repeat_interleave(4, 1)
    scores = a @ b.transpose(-2, -1) / 32**0.5
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ c
def kib(name):
    return int(next(x for x in open("/proc/self/status") if x.startswith(name)).split()[1])
with torch.inference_mode():
    attend(16)
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from here
    before = kib("VmRSS")
    attend(T)
print(kib("VmHWM") - before)
"""


def attention_memory(report, rounds: int) -> list[dict]:
    """Peak memory that attention adds at 4096 tokens, its result included; Linux only."""
    kib = {}
    for form in ("explicit", "sdpa"):
        command = [sys.executable, "-c", ATTENTION, "4096", form]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        kib[form] = int(done.stdout)
    return [
        {
            "case": "attention memory, 4096 tokens",
            "form": "sdpa",
            "against": "explicit",
            "mib": {form: value / 1024 for form, value in kib.items()},
            "share": kib["sdpa"] / kib["explicit"],
        }
    ]


def imports(report, rounds: int) -> list[dict]:
    """Wall seconds of `import torch` and of `import course_lib` behind it, in new processes."""
    code = (
        "import time; a = time.perf_counter(); import torch; b = time.perf_counter(); "
        "import course_lib, sys; print(b - a, time.perf_counter() - b); "
        "assert 'torch._dynamo' not in sys.modules"
    )
    spent = []
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        spent.append([float(part) for part in done.stdout.split()])
    torch_s, own_s = (statistics.median(column) for column in zip(*spent, strict=True))
    return [{"case": "import", "torch_s": torch_s, "course_lib_s": own_s}]


def whole_call(report, rounds: int) -> list[dict]:
    """A call of generate with everything in it: 32 tokens behind a prompt of 32, greedy."""
    model = course_model()
    peer = peers.qwen3_of(model)
    ids = token_ids(model, 1, 32)
    calls = {
        BASE: lambda: peer.generate(ids, max_new_tokens=32, do_sample=False),
        "plain": lambda: model.generate(ids, 32, 0.0, engine="readable"),
        "fast": lambda: model.generate(ids, 32, 0.0),
    }
    assert torch.equal(calls["plain"](), calls["fast"]())
    contenders = {
        name: Contender(lambda: None, lambda _, call=call: call()) for name, call in calls.items()
    }
    seconds = interleave(contenders, max(5, rounds // 2))
    return rows_of("generate, 32 tokens behind 32", seconds, BASE, 32, None)
