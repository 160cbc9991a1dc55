"""The demo's checkpoints, as the safetensors library and a reader of bytes see them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parallelkit_torch.demo.model import CausalLM

from parallelkit import hooks
from parallelkit.decoder import INIT_STD, ModelConfig
from parallelkit.demo.checkpoint import save_checkpoint, save_random_checkpoint

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

CONFIG = ModelConfig(vocab_size=11, hidden_size=64, num_attention_heads=2, num_key_value_heads=1)


def header(folder: Path) -> tuple[dict[str, Any], int]:
    """Return the header, and where data begin."""
    data = (folder / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), end


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_comes_back_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    torch.manual_seed(0)
    net = CausalLM(CONFIG).to(getattr(torch, dtype))
    source = hooks.weight_source(net)
    save_checkpoint(tmp_path, CONFIG, source, positions=99)
    loaded = safetensors.load_file(tmp_path / "model.safetensors")
    expected = net.state_dict()
    assert set(expected) - set(loaded) == {"lm_head.weight"}
    assert list(CONFIG.shapes()) == [name for name in expected if name != "lm_head.weight"]
    for name, tensor in loaded.items():
        assert tensor.dtype == expected[name].dtype
        assert tuple(tensor.shape) == CONFIG.shapes()[name]
        assert torch.equal(tensor, expected[name]), name
    entries, begin = header(tmp_path)
    assert entries["__metadata__"] == {"format": "pt"}
    assert begin % 8 == 0


def test_the_configuration_is_a_qwen2s(tmp_path: Path) -> None:
    save_random_checkpoint(tmp_path, CONFIG, seed=0, dtype="bfloat16", positions=99)
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["architectures"] == ["Qwen2ForCausalLM"]
    assert said["tie_word_embeddings"] is True
    assert said["torch_dtype"] == "bfloat16"
    assert said["max_position_embeddings"] == 99
    assert {name: said[name] for name in ("vocab_size", "num_key_value_heads")} == {
        "vocab_size": 11,
        "num_key_value_heads": 1,
    }


def test_a_later_save_replaces_the_weights(tmp_path: Path) -> None:
    net = CausalLM(CONFIG)
    source = hooks.weight_source(net)
    save_checkpoint(tmp_path, CONFIG, source, positions=9)
    before = (tmp_path / "model.safetensors").read_bytes()
    with torch.no_grad():
        net.model.norm.weight.fill_(2.0)
    save_checkpoint(tmp_path, CONFIG, source, positions=9)
    assert len((tmp_path / "model.safetensors").read_bytes()) == len(before)
    loaded = safetensors.load_file(tmp_path / "model.safetensors")
    assert torch.equal(loaded["model.norm.weight"], torch.full((64,), 2.0))


def test_random_weights_are_as_a_model_begins(tmp_path: Path) -> None:
    files = []
    for seed, dtype in ((1, "float32"), (1, "float32"), (2, "float32"), (1, "bfloat16")):
        save_random_checkpoint(tmp_path, CONFIG, seed=seed, dtype=dtype, positions=9)
        files.append((tmp_path / "model.safetensors").read_bytes())
    assert files[0] == files[1] != files[2]
    half = safetensors.load_file(tmp_path / "model.safetensors")
    save_random_checkpoint(tmp_path, CONFIG, seed=1, dtype="float32", positions=9)
    full = safetensors.load_file(tmp_path / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in full.items()} == CONFIG.shapes()
    for name, tensor in full.items():
        np.testing.assert_allclose(half[name].float(), tensor, rtol=2**-7, err_msg=name)
    assert full["model.norm.weight"].eq(1).all()
    assert full["model.layers.0.self_attn.q_proj.bias"].eq(0).all()
    assert 0.9 < full["model.layers.3.mlp.up_proj.weight"].std() / INIT_STD < 1.1
