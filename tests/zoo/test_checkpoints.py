"""One file a model: round trips of every variant, and clear words about a wrong file."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from course_lib import Config, ModernDecoder, YaRN
from course_lib.zoo.checkpoints import build_decoder, describe, load, rebuild, save
from tests.helpers import VARIANTS, ids_of, jittered, small


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_config_survives_json(variant):
    cfg = small(**VARIANTS[variant])
    assert rebuild(json.loads(json.dumps(describe(cfg)))) == cfg


@pytest.mark.parametrize("variant", ["default", "untied", "MLA absorbed", "sigmoid, bias, groups"])
def test_a_model_survives_its_file(variant, tmp_path):
    model, path = jittered(small(**VARIANTS[variant])), tmp_path / "model.safetensors"
    save(model, path)
    state = torch.get_rng_state()
    again = load(str(path))
    assert torch.equal(torch.get_rng_state(), state), "loading draws nothing"
    assert again.cfg == model.cfg and not again.training
    for (name, a), (twin, b) in zip(
        model.state_dict().items(), again.state_dict().items(), strict=True
    ):
        assert name == twin and torch.equal(a, b)
    assert (again.lm_head.weight is again.embed.weight) == model.cfg.tied
    again(ids_of(model.cfg, 1, 3))[0].sum().backward()
    assert again.embed.weight.grad is not None


def test_bfloat16_stays_bfloat16(tmp_path):
    save(jittered(small(), dtype=torch.bfloat16), tmp_path / "half")
    assert load(tmp_path / "half").embed.weight.dtype == torch.bfloat16


def test_a_wrong_file_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    save(jittered(small()), path)
    damaged = tmp_path / "damaged"
    damaged.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="damaged.* is no whole safetensors file"):
        load(damaged)
    save_file(load_file(path), tmp_path / "bare")
    with pytest.raises(ValueError, match="tensors but no Config"):
        load(tmp_path / "bare")
    with pytest.raises(ValueError, match="part='Pickle' is unknown"):
        rebuild({"part": "Pickle"})
    with pytest.raises(ValueError, match="d_head=7"):
        rebuild(describe(Config()) | {"d_head": 7})


def test_wrong_weights_are_named():
    weights = dict(jittered(small()).state_dict())
    lost = weights.pop("blocks.1.attn.W_q.weight")
    with pytest.raises(ValueError, match=r"1 missing \['blocks.1.attn.W_q.weight'\], 0 unexpected"):
        build_decoder(small(), weights)
    weights["blocks.1.attn.W_q.weight"] = lost.T
    with pytest.raises(ValueError, match=r"W_q.weight=\(24, 32\), expected \(32, 24\)"):
        build_decoder(small(), weights)
    weights["blocks.1.attn.W_q.weight"] = lost
    with pytest.raises(ValueError, match=r"1 unexpected \['extra'\]"):
        build_decoder(small(), weights | {"extra": lost})
    assert isinstance(build_decoder(small(), weights), ModernDecoder)


def test_a_part_is_described_by_name():
    assert describe(YaRN())["part"] == "YaRN"
    assert describe(Config())["position"]["scaling"] is None
