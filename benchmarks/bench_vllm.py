"""A weight update of a live vLLM engine on the CPU, against vLLM's own ways to change weights.

The trainer is this process, with a torch model in the shape of Qwen2; the engine is an `LLM` with
its worker in processes of its own. Every element is changed before the clock starts, which stops
when the engine can generate with it. `reload`: a checkpoint written to tmpfs, then vLLM's
`reload_weights`. `bytes`: safetensors made in memory, then `collective_rpc`. In turns, with one
memcpy of as many bytes. All ways must give the same tokens. Needs vLLM: run it in its environment.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench_shm import memcpy
from common import Goal, Row, Run, Timing, finish, interleaved, parser, ratios, show, wait_idle
from model_layouts import Layout, Module

SIZES: Final = {"4MB": 4 * 10**6, "50MB": 50 * 10**6, "1GB": 10**9}
#: Hidden size, layers, inner size, heads and groups of heads; the largest is Qwen2-0.5B's.
SHAPES: Final = {
    "4MB": (128, 2, 512, 4, 2),
    "50MB": (512, 8, 1408, 8, 2),
    "1GB": (896, 24, 4864, 14, 2),
}
ARMS: Final = ("parallelkit", "reload", "bytes")
COPY: Final = "memcpy"
TOKENS: Final = 8
#: vLLM's settings; they have to be there when it is imported.
ENVIRON: Final = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
INSIDE: Final = "--one-size"
COLUMNS: Final = (
    *("size", "tensors", "arm", "update ms", "low ms", "high ms", "GB/s", "of memcpy"),
    *("pause ms", "pause low ms", "pause high ms", "times slower", "phases"),
)


class Took(NamedTuple):
    """One update: seconds in all, seconds in which the engine can generate nothing, by phase."""

    seconds: float
    pause: float
    phases: dict[str, float]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--sizes", nargs="+", choices=SIZES, default=["50MB", "1GB"])
    made.add_argument("--updates", type=int, default=9, help="timed updates of each way")
    made.add_argument("--verify", choices=("digest", "off"), default="digest")
    made.add_argument(
        "--limit", type=float, default=1800.0, metavar="SECONDS", help="for one size, all in all"
    )
    args = made.parse_args()
    if importlib.util.find_spec("vllm") is None:
        sys.exit(f"{sys.executable} has no vLLM; `make venv-vllm`, and run it by that Python")
    if args.quick:
        args.sizes, args.updates = ["4MB"], 3
    run = Run("vllm", args)
    rows: list[Row] = []
    missing: list[Row] = []
    peers: list[Row] = []
    for size in args.sizes:
        busy = wait_idle(args.wait_idle) if args.wait_idle else None
        found = in_own_process(size, args)
        rows += found["rows"]
        missing += found["missing"]
        peers += [peer | {"cores busy before": busy} for peer in found["peers"]]
    result = run.result(
        rows, goals(rows), updates=args.updates, verify=args.verify, peers=peers, missing=missing
    )
    finish(result, COLUMNS, args.output)
    if missing:
        sys.exit("\n".join(f"{lack['arm']} {lack['size']}: {lack['why']}" for lack in missing))


def in_own_process(size: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one size in a process group of its own, which ends whatever becomes of it."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        told = [size, str(args.updates), args.verify, str(output)]
        log = Path(folder) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, __file__, INSIDE, *told],
                env={**os.environ, **ENVIRON},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | str = process.wait(args.limit)
            except subprocess.TimeoutExpired:
                code = f"no end after {args.limit:.0f} s"
            finally:
                _end_group(process)
        if output.exists():
            found: dict[str, Any] = json.loads(output.read_text())
            return found
        print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
        why = code if isinstance(code, str) else f"the process ended with {code}"
        missing = [{"size": size, "arm": arm, "why": why} for arm in ARMS]
        return {"rows": [], "missing": missing, "peers": []}


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a process and its engine's."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def measure(size: str, updates: int, verify: str, output: Path) -> None:
    """All ways for one size; the result is written to `output`."""
    layout, config = qwen2(size)
    model = Module(layout)
    model.randomise()
    folder = Path(tempfile.mkdtemp(prefix="parallelkit-bench-", dir="/dev/shm"))
    try:
        (folder / "config.json").write_text(json.dumps(config))
        save(model, folder)
        found = measure_engine(size, layout, model, folder, updates, verify)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    output.write_text(json.dumps(found))


def measure_engine(
    size: str, layout: Layout, model: Module, folder: Path, updates: int, verify: str
) -> dict[str, Any]:
    """Start an engine and update it in all ways, in turns."""
    from vllm import LLM

    import parallelkit as pk

    start = time.perf_counter()
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_batched_tokens=512,
        dtype="bfloat16",
        kv_cache_memory_bytes=16 << 20,
        worker_extension_cls="vllm_worker.BytesExtension",
        weight_transfer_config={"backend": "parallelkit"},
    )
    started = time.perf_counter() - start
    with pk.publish_weights(model.target, verify=verify, timeout=600.0) as publisher:
        publisher.attach(llm)
        ways: dict[str, Callable[[], Took]] = {
            "parallelkit": lambda: by_parallelkit(publisher),
            "reload": lambda: by_reload(llm, model, folder),
            "bytes": lambda: by_bytes(llm, model),
        }
        ways, missing = usable(size, llm, model, ways)
        took: dict[str, list[Took]] = {name: [] for name in ways}
        calls = {name: timed(ways[name], model, took[name]) for name in ways}
        copy = memcpy(layout.nbytes)

        def copied() -> float:
            begin = time.perf_counter()
            copy()
            return time.perf_counter() - begin

        seconds = interleaved({COPY: copied, **calls}, warmups=1, repeats=updates)
        took = {name: found[-updates:] for name, found in took.items()}  # without the warm-up
    llm.llm_engine.engine_core.shutdown()
    label = {"size": size, "tensors": len(layout.shapes), "nbytes": layout.nbytes}
    peer = {
        **label,
        "memcpy ms": statistics.median(seconds[COPY]) * 1e3,
        "memcpy GB/s": layout.nbytes / statistics.median(seconds[COPY]) / 1e9,
        "engine up s": started,
    }
    rows = [label | {"arm": name} | columns(layout, name, took, seconds) for name in ways]
    return {"rows": rows, "missing": missing, "peers": [peer]}


def usable(
    size: str, llm: Any, model: Module, ways: dict[str, Callable[[], Took]]
) -> tuple[dict[str, Callable[[], Took]], list[Row]]:
    """Try each way once, from the same weights: what fails is said, and left out.

    Raises:
        RuntimeError: two ways give other tokens, so that one of them does not update.
    """
    before, missing, tokens = generate(llm), [], {}
    for name, way in ways.items():
        model.negate()
        try:
            way()
            tokens[name] = generate(llm)
            model.negate()
            way()
        except Exception as error:
            if name == "parallelkit":
                raise
            text = " ".join(str(error).split())[:200]
            missing.append({"size": size, "arm": name, "why": f"{type(error).__name__}: {text}"})
            continue
        if tokens[name] == before or generate(llm) != before:
            raise RuntimeError(f"{name}: the engine did not follow there and back: {tokens}")
    if any(found != tokens["parallelkit"] for found in tokens.values()):
        raise RuntimeError(f"the same weights give other tokens: {tokens}")
    return {name: way for name, way in ways.items() if name in tokens}, missing


def timed(way: Callable[[], Took], model: Module, found: list[Took]) -> Callable[[], float]:
    """Change every element, then update; keeps what it took."""

    def call() -> float:
        model.negate()
        found.append(way())
        return found[-1].seconds

    return call


def by_parallelkit(publisher: Any) -> Took:
    start = time.perf_counter()
    report = publisher.update()
    seconds = time.perf_counter() - start
    (engine,) = report.engines
    assert engine.state == "committed", report
    return Took(seconds, engine.pause_seconds, dict(report.phases))


def by_reload(llm: Any, model: Module, folder: Path) -> Took:
    start = time.perf_counter()
    save(model, folder)
    saved = time.perf_counter()
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
    llm.reset_prefix_cache()
    end = time.perf_counter()
    return Took(end - start, end - saved, {"save": saved - start, "reload": end - saved})


def by_bytes(llm: Any, model: Module) -> Took:
    from safetensors.torch import save as to_bytes

    start = time.perf_counter()
    data = to_bytes(model.state())
    made = time.perf_counter()
    llm.collective_rpc("load_bytes", args=(data,))
    llm.reset_prefix_cache()
    end = time.perf_counter()
    return Took(end - start, end - made, {"serialise": made - start, "call": end - made})


def columns(
    layout: Layout, name: str, took: dict[str, list[Took]], seconds: dict[str, list[float]]
) -> Row:
    """A row's figures."""
    update, pause = (Timing.of([t[at] for t in took[name]]) for at in (0, 1))
    share = ratios(seconds[COPY], seconds[name])
    ours = [t.seconds for t in took["parallelkit"]]
    slower = ratios(seconds[name], ours)
    stops = ratios([t.pause for t in took[name]], [t.pause for t in took["parallelkit"]])
    phases = {
        phase: statistics.median(t.phases[phase] for t in took[name]) * 1e3
        for phase in took[name][0].phases
    }
    return {
        "update ms": update.median * 1e3,
        "low ms": update.low * 1e3,
        "high ms": update.high * 1e3,
        "GB/s": layout.nbytes / update.median / 1e9,
        "of memcpy": share.median,
        "pause ms": pause.median * 1e3,
        "pause low ms": pause.low * 1e3,
        "pause high ms": pause.high * 1e3,
        "times slower": slower.median,
        "times longer pause": stops.median,
        "phases ms": phases,
        "phases": " ".join(f"{phase} {show(ms)}" for phase, ms in phases.items()),
    }


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Not slower than either of vLLM's ways, and no longer pause."""
    return [
        Goal(f"{row['size']}: {what} of {row['arm']} over ours", 1.0, row[column])
        for row in rows
        if row["arm"] != "parallelkit"
        for what, column in (("update", "times slower"), ("pause", "times longer pause"))
    ]


def generate(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": [3 + i + k for i in range(7)]} for k in range(3)]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def save(model: Module, folder: Path) -> None:
    """Write the checkpoint anew, beside what the engine may still have mapped."""
    from safetensors.torch import save_file

    save_file(model.state(), folder / "next.tmp", metadata={"format": "pt"})
    (folder / "next.tmp").replace(folder / "model.safetensors")


def qwen2(size: str) -> tuple[Layout, dict[str, Any]]:
    """Names and shapes of a Qwen2 of about this size, and its configuration.

    The vocabulary fills up what the layers leave. The head is not tied: with a tied one vLLM's
    `reload_weights` leaves old weights in it where the processor has AVX-512.
    """
    width, layers, inner, heads, groups = SHAPES[size]
    head = width // heads
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(layers):
        at = f"model.layers.{i}"
        shapes[f"{at}.input_layernorm.weight"] = (width,)
        for name, rows in (("q", width), ("k", groups * head), ("v", groups * head)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, width)
            shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (width, width)
        shapes[f"{at}.post_attention_layernorm.weight"] = (width,)
        shapes[f"{at}.mlp.gate_proj.weight"] = (inner, width)
        shapes[f"{at}.mlp.up_proj.weight"] = (inner, width)
        shapes[f"{at}.mlp.down_proj.weight"] = (width, inner)
    shapes["model.norm.weight"] = (width,)
    used = sum(math.prod(shape) for shape in shapes.values())
    words = (SIZES[size] // 2 - used) // (2 * width) // 64 * 64
    ends = {"model.embed_tokens.weight": (words, width), "lm_head.weight": (words, width)}
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head,
        "vocab_size": words,
        "max_position_embeddings": 512,
        "max_window_layers": layers,
        "use_sliding_window": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return Layout("qwen2", "bfloat16", ends | shapes), config


if __name__ == "__main__":
    if sys.argv[1:2] == [INSIDE]:
        size, updates, verify, output = sys.argv[2:]
        measure(size, int(updates), verify, Path(output))
    else:
        main()
