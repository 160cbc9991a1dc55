"""A trainer whose follower is a vLLM engine, in MindSpore or in Torch.

    python vllm_trainer.py train eager|graph DTYPE FOLDER    trains in MindSpore
    python vllm_trainer.py replay - DTYPE FOLDER             publishes in Torch what that one saved

It prints a ticket, waits until the engine joined, and updates it `VERSIONS` times; `train` saves a
checkpoint `FOLDER/v1`, ... of each version before the engine gets it. MindSpore trains in float32;
what it publishes has DTYPE, by a copy where that is another. A JSON line for each version. In
float32 the logits of a few windows, `FOLDER/probe.npy`, are saved too: `FOLDER/torch-1.npy`, ...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np

import parallelkit as pk
from parallelkit import hooks
from parallelkit.decoder import ModelConfig
from parallelkit.demo.checkpoint import save_checkpoint

VERSIONS, BATCH, BLOCK, POSITIONS = 3, 8, 32, 256
PROBES = 2
#: Steps of a version. PyNative is slow; long enough for words where there is time.
STEPS = {"eager": 2, "graph": 30}
SECONDS = 300.0


def corpus() -> tuple[np.ndarray, ModelConfig]:
    """Windows of `BLOCK + 1` characters of the licence, int32, and a model for them."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()[:8000]
    alphabet = sorted(set(text))
    numbers = np.array([alphabet.index(c) for c in text], np.int32)
    starts = np.arange(0, len(numbers) - BLOCK - 1, BLOCK)
    config = ModelConfig(vocab_size=len(alphabet), hidden_size=128, num_hidden_layers=2)
    return numbers[starts[:, None] + np.arange(BLOCK + 1)], config


def emit(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def mindspore_versions(mode: str, dtype: str, folder: Path) -> tuple[Any, Iterator[None]]:
    """Return what is published, and an iterator of which every turn trains a version more."""
    import mindspore as ms
    from mindspore import nn, ops
    from parallelkit_mindspore.demo.model import CausalLM, copy_values

    windows, config = corpus()
    ms.set_seed(3)
    net = CausalLM(config)
    published = net if dtype == "float32" else CausalLM(config, dtype=getattr(ms, dtype))
    source = hooks.weight_source(published)

    def loss(logits: Any, targets: Any) -> Any:
        return ops.cross_entropy(logits.reshape((-1, config.vocab_size)), targets.reshape((-1,)))

    def turns() -> Iterator[None]:
        context = pk.parallel_context()
        model = context.parallelize(net)
        optimizer = nn.Adam(model.trainable_params(), 2e-3)
        execution = pk.execution_mode(mode)
        ready = execution.compile(model)
        rows = iter(
            np.random.default_rng(0).integers(0, len(windows), (VERSIONS * STEPS[mode], BATCH))
        )
        for version in range(1, VERSIONS + 1):
            losses = []
            for _ in range(STEPS[mode]):
                batch = ms.Tensor(windows[next(rows)])
                losses.append(context.train_step(ready, batch[:, :-1], batch[:, 1:], loss=loss))
                context.apply_gradients(ready, optimizer)
            emit(losses=[float(x) for x in losses], graphs=execution.graphs)
            if published is not net:
                copy_values(net, published)
            save_checkpoint(folder / f"v{version}", config, source, positions=POSITIONS)
            if published is net:
                np.save(folder / "probe.npy", windows[:PROBES, :-1])
                logits = net(ms.Tensor(windows[:PROBES, :-1]))
                np.save(folder / f"mindspore-{version}.npy", logits.asnumpy())
            yield

    return published, turns()


def torch_versions(mode: str, dtype: str, folder: Path) -> tuple[Any, Iterator[None]]:
    """Return a Torch model, and an iterator of which every turn reads a saved version into it."""
    import torch
    from parallelkit_torch.demo.model import CausalLM
    from safetensors.torch import load_file

    torch.set_num_threads(1)
    net = CausalLM(corpus()[1]).to(getattr(torch, dtype))

    def turns() -> Iterator[None]:
        for version in range(1, VERSIONS + 1):
            saved = load_file(folder / f"v{version}" / "model.safetensors")
            missing, unknown = net.load_state_dict(saved, strict=False)
            assert (missing, unknown) == (["lm_head.weight"], [])
            if dtype == "float32":
                with torch.no_grad():
                    logits = net(torch.from_numpy(np.load(folder / "probe.npy")))
                np.save(folder / f"torch-{version}.npy", logits.numpy())
            yield

    return net, turns()


MAKERS: dict[str, tuple[str, Callable[..., tuple[Any, Iterator[None]]]]] = {
    "train": ("mindspore", mindspore_versions),
    "replay": ("torch", torch_versions),
}


def main(role: str, mode: str, dtype: str, folder: str) -> None:
    framework, make = MAKERS[role]
    with pk.init_process_group(framework, device="cpu"):
        published, turns = make(mode, dtype, Path(folder))
        with pk.publish_weights(published, timeout=SECONDS) as publisher:
            emit(ticket=publisher.ticket, config=attrs.asdict(corpus()[1]))
            publisher.wait(1, timeout=SECONDS)
            for _ in turns:
                report = publisher.update()
                emit(
                    version=report.version,
                    states=[member.state for member in report.members],
                    transport=report.transport,
                    changed=report.changed_ratio,
                )
            sys.stdin.readline()  # the engine says when it has seen the last version


if __name__ == "__main__":
    main(*sys.argv[1:])
