"""Tiny checkpoints for real engines, by numpy alone: random Qwen2 models of two layers.

Small as they are, their greedy tokens differ between seeds, and head_dim 32 is the least that
vLLM's attention on the CPU takes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parallelkit.weights.manifest import DTYPE_BYTES, Manifest, TensorSpec

HIDDEN, INNER, LAYERS, HEADS, GROUPS, WIDTH, WORDS = 128, 256, 2, 4, 2, 32, 256

CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int8": "I8", "uint8": "U8"}


class Raw(NamedTuple):
    """One tensor as bytes, row-major."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def values(self) -> np.ndarray[Any, Any]:
        """As float32."""
        if self.dtype == "bfloat16":
            wide = np.frombuffer(self.data, np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).reshape(self.shape)
        return np.frombuffer(self.data, self.dtype).astype(np.float32).reshape(self.shape)


Tensors = dict[str, Raw]


def raw(values: np.ndarray[Any, Any], dtype: str = "bfloat16") -> Raw:
    """Round values to a dtype; infinities and values that are no numbers stay so."""
    if dtype != "bfloat16":
        return Raw(dtype, values.shape, values.astype(dtype).tobytes())
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    odd = ~np.isfinite(values)
    halves = np.where(odd, (bits >> 16) | np.where(np.isnan(values), 0x40, 0), rounded)
    return Raw(dtype, values.shape, halves.astype(np.uint16).tobytes())


def tensors(seed: int = 0, *, tied: bool = False, dtype: str = "bfloat16") -> Tensors:
    """Names and tensors as a checkpoint has them; a tied head is not among them."""
    random = np.random.default_rng(seed)

    def make(*shape: int, scale: float = 0.12, mean: float = 0.0) -> Raw:
        return raw(random.standard_normal(shape, np.float32) * scale + mean, dtype)

    found = {"model.embed_tokens.weight": make(WORDS, HIDDEN, scale=1.0)}
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        for name, heads in (("q_proj", HEADS), ("k_proj", GROUPS), ("v_proj", GROUPS)):
            found[f"{at}self_attn.{name}.weight"] = make(heads * WIDTH, HIDDEN)
            found[f"{at}self_attn.{name}.bias"] = make(heads * WIDTH)
        found[f"{at}self_attn.o_proj.weight"] = make(HIDDEN, HEADS * WIDTH)
        found[f"{at}mlp.gate_proj.weight"] = make(INNER, HIDDEN)
        found[f"{at}mlp.up_proj.weight"] = make(INNER, HIDDEN)
        found[f"{at}mlp.down_proj.weight"] = make(HIDDEN, INNER)
        found[f"{at}input_layernorm.weight"] = make(HIDDEN, mean=1.0)
        found[f"{at}post_attention_layernorm.weight"] = make(HIDDEN, mean=1.0)
    found["model.norm.weight"] = make(HIDDEN, mean=1.0)
    if not tied:
        found["lm_head.weight"] = make(WORDS, HIDDEN)
    return found


def config(*, tied: bool = False, dtype: str = "bfloat16", words: int = WORDS) -> dict[str, Any]:
    """The Hugging Face configuration of these models."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": WIDTH,
        "vocab_size": words,
        "max_position_embeddings": 512,
        "max_window_layers": LAYERS,
        "use_sliding_window": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "dtype": dtype,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def write_file(path: Path, given: Mapping[str, Raw]) -> None:
    """Write a safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in given.items():
        start, end = end, end + len(tensor.data)
        header[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in given.values():
            file.write(tensor.data)


def read_file(path: Path) -> Tensors:
    """Read what `write_file` wrote."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    names = {code: dtype for dtype, code in CODES.items()}
    found = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            start, end = (8 + size + at for at in entry["data_offsets"])
            found[name] = Raw(names[entry["dtype"]], tuple(entry["shape"]), data[start:end])
    return found


def save(
    folder: Path,
    seed: int = 0,
    *,
    tied: bool = False,
    given: Mapping[str, Raw] | None = None,
    words: int = WORDS,
) -> Path:
    """Write a checkpoint that vLLM starts from; of `given` tensors, or of random ones."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(tied=tied, words=words), indent=1))
    write_file(folder / "model.safetensors", given or tensors(seed, tied=tied))
    return folder


class Source:
    """Tensors as a `WeightSource`; `aliases` are other names of some of them."""

    device = "cpu"

    def __init__(self, given: Mapping[str, Raw], aliases: Mapping[str, str] | None = None) -> None:
        self._held = dict(given)
        self._aliases = dict(aliases or {})
        self._manifest = manifest(given, self._aliases)

    def manifest(self) -> Manifest:
        return self._manifest

    def begin(self) -> None:
        """Nothing can have changed but values."""

    def put(self, given: Mapping[str, Raw]) -> None:
        """Take the values of the next version."""
        assert manifest(given, self._aliases) == self._manifest
        self._held = dict(given)

    def host_bytes(self, index: int) -> memoryview:
        return memoryview(self._held[self._manifest.unique[index].name].data)

    def adopt(self, buffers: Iterable[memoryview]) -> None:
        raise NotImplementedError


def manifest(given: Mapping[str, Raw], aliases: Mapping[str, str] | None = None) -> Manifest:
    """The manifest of tensors, each of the bytes that it says."""
    specs = [TensorSpec(name=n, dtype=t.dtype, shape=t.shape) for n, t in given.items()]
    for spec in specs:
        assert len(given[spec.name].data) == spec.nbytes, spec
        assert spec.dtype in DTYPE_BYTES
    for name, owner in (aliases or {}).items():
        other = given[owner]
        specs.append(TensorSpec(name=name, dtype=other.dtype, shape=other.shape, alias_of=owner))
    return Manifest(specs)


def prompts() -> list[list[int]]:
    """Token ids: two short prompts, and one that fills more than a block of 128."""
    random = np.random.default_rng(7)
    return [random.integers(3, WORDS, n).tolist() for n in (5, 17, 150)]


def greedy(llm: Any, count: int = 16, asked: list[list[int]] | None = None) -> list[list[int]]:
    """Greedy token ids of an engine for `prompts`; it must have nothing left to do after."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=count, detokenize=False, ignore_eos=True)
    given = [{"prompt_token_ids": ids} for ids in (asked or prompts())]
    outputs = llm.generate(given, sampling, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    return [list(output.outputs[0].token_ids) for output in outputs]
