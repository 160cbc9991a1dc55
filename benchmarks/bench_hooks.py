"""Cost of a hook call, and how many of them a training step makes (none).

Times one first-result hook: through the typed wrapper of `parallelkit.hooks`, through pluggy
alone, and as a plain method call, with one and with several plugins registered. Then trains on
one rank with every call into a plugin counted: by patching both ways in, and by the profiler.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pluggy
from common import Goal, Row, Run, Timing, finish, parser, time_loop, wait_idle

from parallelkit import hooks, hookspecs, loader, records
from parallelkit.plugin import hookimpl
from parallelkit.testing.arrays import Arrays

COLUMNS = ("way", "plugins", "µs", "low µs", "high µs", "of method")
PLUGINS = (1, 4, 16)


class Plugin:
    """Knows models of one type only."""

    parallelkit_api = 1

    def __init__(self, answer: Arrays | None) -> None:
        self.answer = answer

    @hookimpl
    def parallelkit_weight_source(self, model: Any) -> Any:
        return self.answer

    def plain(self, model: Any) -> Any:
        return self.answer


def main() -> None:
    args = parser(__doc__).parse_args()
    wait_idle(args.wait_idle)
    run = Run("hooks", args)
    repeats = 3 if args.quick else 21
    rows = [row for count in PLUGINS for row in time_ways(count, repeats)]
    steps = 5 if args.quick else 100
    counts = count_in_training(steps)
    goal = Goal(f"hook calls in {steps} training steps", 0, counts["steps"], at_least=False)
    finish(run.result(rows, [goal], training=counts), COLUMNS, args.output)
    print(f"hook calls while setting up: {counts['setup']}; frames of parallelkit in a step:")
    for name, number in counts["frames in a step"].items():
        print(f"  {number:g} x {name}")


def time_ways(count: int, repeats: int) -> list[Row]:
    """Time a call where the last plugin of `count` answers: every one before it says no."""
    model = object()
    answer = Arrays({})
    plugins = [Plugin(None) for _ in range(count - 1)] + [Plugin(answer)]
    manager = loader.PluginManager(environ={}, scan=False, builtin=False)
    raw = pluggy.PluginManager(hookspecs.PROJECT)
    raw.add_hookspecs(hookspecs)
    for number, plugin in enumerate(plugins):
        manager.register(plugin, f"bench-{number:02}")
    for plugin in reversed(plugins):  # pluggy asks the last one first
        raw.register(plugin)
    hook, method = raw.hook.parallelkit_weight_source, plugins[-1].plain
    ways: dict[str, Callable[[], Any]] = {
        "method": lambda: method(model=model),
        "pluggy": lambda: hook(model=model),
        "parallelkit.hooks": lambda: hooks.weight_source(model, manager=manager),
    }
    timings: dict[str, Timing] = {}
    for name, call in ways.items():
        got = call()
        assert (got[0] if isinstance(got, list) else got) is answer, f"{name} answered {got!r}"
        timings[name] = time_loop(call, repeats=repeats, seconds=0.05 if repeats > 3 else 0.01)
    base = timings["method"].median
    return [
        {
            "way": name,
            "plugins": count,
            "µs": t.median * 1e6,
            "low µs": t.low * 1e6,
            "high µs": t.high * 1e6,
            "of method": t.median / base,
        }
        for name, t in timings.items()
    ]


def count_in_training(steps: int) -> dict[str, Any]:
    """Train with a group, a context, a loader and an execution mode, counting hook calls."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import parallelkit as pk

    with counted_hooks() as calls:
        with pk.init_process_group(framework="torch") as group:
            context = pk.parallel_context(data=-1, group=group)
            model = context.parallelize(nn.Linear(16, 4))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            items = 2 * (steps + 1)
            data = TensorDataset(torch.randn(items, 16), torch.randn(items, 4))
            batches = iter(context.shard(data, batch_size=2))

            def train(x: torch.Tensor, y: torch.Tensor) -> None:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()

            step = pk.execution_mode("eager").compile(train)
            step(*next(batches))
            setup = dict(calls)
            with counted_frames() as frames:
                for batch in batches:
                    step(*batch)
        in_steps = sum(calls.values()) - sum(setup.values())
    hooked = [name for name in frames if "hooks." in name or "hookspecs." in name]
    return {
        "setup": sum(setup.values()),
        "setup by hook": setup,
        "steps": in_steps + sum(frames[name] for name in hooked),
        "frames in a step": {name: n / steps for name, n in sorted(frames.items())},
        "torch": torch.__version__,
    }


@contextmanager
def counted_hooks() -> Iterator[Counter[str]]:
    """Count calls of plugins' implementations, by the hook's name, and of pluggy's callers."""
    calls: Counter[str] = Counter()
    ours, pluggys = records.Implementation.__call__, pluggy.HookCaller.__call__

    def implementation(self: records.Implementation, **given: Any) -> Any:
        calls[getattr(self.function, "__name__", "?")] += 1
        return ours(self, **given)

    def caller(self: pluggy.HookCaller, **given: Any) -> Any:
        calls[f"pluggy {self.name}"] += 1
        return pluggys(self, **given)

    records.Implementation.__call__ = implementation  # type: ignore[method-assign]
    pluggy.HookCaller.__call__ = caller  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        records.Implementation.__call__ = ours  # type: ignore[method-assign]
        pluggy.HookCaller.__call__ = pluggys  # type: ignore[method-assign]


@contextmanager
def counted_frames() -> Iterator[Counter[str]]:
    """Count Python functions of parallelkit and pluggy that are entered, by the profiler."""
    frames: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.partition(".")[0].startswith(("parallelkit", "pluggy")):
            frames[f"{module}.{frame.f_code.co_qualname}"] += 1

    sys.setprofile(profile)
    try:
        yield frames
    finally:
        sys.setprofile(None)


if __name__ == "__main__":
    main()
