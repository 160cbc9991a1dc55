"""Eager or graph for an engine: the arguments to start it with, and what it then really runs."""

from __future__ import annotations

import copy
import json
from typing import Any, Final, NoReturn, final

from parallelkit.errors import ExecutionModeError, UnsupportedFeatureError
from parallelkit.specs import ExecutionSpec
from parallelkit_vllm import compiling, platforms
from parallelkit_vllm.compiling import MODES, Outcome
from parallelkit_vllm.versions import check_version

_AT_START: Final = "an engine executes as it was started: LLM(MODEL, **mode.engine_args)"


def set_execution_mode(spec: ExecutionSpec) -> EngineExecutionMode:
    """Prepare the mode that `spec` asks for. Starts nothing; not collective.

    vLLM is imported only if its options are given, or where its platform is not known without.

    Raises:
        UnsupportedFeatureError: an unknown option; or graph mode, or something that was asked for
            in it, cannot be had here and `spec.fallback` is off.
        ExecutionModeError: a value that is not allowed, or options that contradict each other.
        EngineVersionError: vLLM is missing, too old, or cannot be imported.
    """
    check_version()
    if spec.mode == "eager":
        return EngineExecutionMode("eager", compiling.eager(spec.options))
    outcome = compiling.graph(spec.options, platforms.platform())
    if outcome.refused and not spec.fallback:
        raise UnsupportedFeatureError(
            f"execution mode 'graph' cannot run here as asked: {outcome.refused}. Use "
            "execution_mode('eager', framework='vllm') or fallback=True"
        )
    return EngineExecutionMode("graph", outcome)


@final
class EngineExecutionMode:
    """A `parallelkit.protocols.ExecutionMode` for vLLM's engines.

    An engine's mode is fixed when it starts, so this is no way to run a function, and no block:
    `compile` and `with` are refused. `graphs`, `recompiles` and `graph_breaks` are 0, since vLLM
    compiles in its workers and keeps count there.

    Example:
        >>> mode = set_execution_mode(ExecutionSpec(mode="eager"))  # doctest: +SKIP
        >>> mode.engine_args  # doctest: +SKIP
        {'enforce_eager': True}
    """

    graphs: Final = 0
    recompiles: Final = 0
    graph_breaks: Final = 0

    def __init__(self, requested: str, outcome: Outcome) -> None:
        self._requested = requested
        self._outcome = outcome

    @property
    def requested(self) -> str:
        return self._requested

    @property
    def effective(self) -> str:
        return self._outcome.effective

    @property
    def reason(self) -> str:
        return self._outcome.reason

    @property
    def engine_args(self) -> dict[str, Any]:
        """Keyword arguments of `LLM`, `EngineArgs` and `AsyncEngineArgs`, a copy."""
        return copy.deepcopy(dict(self._outcome.arguments))

    @property
    def server_args(self) -> list[str]:
        """The same as arguments of the command `vllm serve`.

        Raises:
            ExecutionModeError: an option is no plain value, and cannot be written so.
        """
        if self._outcome.arguments["enforce_eager"]:
            return ["--enforce-eager"]
        config = self._outcome.arguments["compilation_config"]
        try:
            return ["--compilation-config", json.dumps(config)]
        except (TypeError, ValueError) as error:
            raise ExecutionModeError(
                f"{config} cannot be given in a command line: {error}; use names instead of enums"
            ) from error

    def compile(self, target: Any) -> NoReturn:
        """Refused: an engine is compiled when it starts.

        Raises:
            ExecutionModeError: always.
        """
        raise ExecutionModeError(
            f"a {type(target).__qualname__} cannot be compiled by vLLM's mode: {_AT_START}"
        )

    def check(self, engine: Any) -> str:
        """Compare a started engine with this mode, and say what it runs.

        Args:
            engine: an `LLM` or an `AsyncLLM`.

        Raises:
            ExecutionModeError: it runs in the other mode: it was started with other arguments, or
                something else turned compiling off, such as LoRA on a CPU or a class of models
                that vLLM does not compile (which shows only of an engine in this process).
        """
        config = getattr(getattr(engine, "llm_engine", engine), "vllm_config", None)
        if config is None:
            raise ExecutionModeError(
                f"a {type(engine).__qualname__} has no vllm_config; give an LLM or an AsyncLLM"
            )
        mode = int(config.compilation_config.mode or 0)
        what = f"compilation mode {MODES[mode]}" if mode < len(MODES) else f"mode {mode}"
        running = "graph" if mode else "eager"
        # with torch's own pipeline the runner compiles the whole; that for the CPU does not
        stock = MODES[mode : mode + 1] == ("STOCK_TORCH_COMPILE",)
        nothing = config.device_config.device_type == "cpu" if stock else _compiled(engine) == 0
        if running == "graph" and nothing:
            running, what = "eager", f"{what}, and no part of this model is compiled"
        if running != self.effective:
            lora = "; LoRA is on" if getattr(config, "lora_config", None) is not None else ""
            raise ExecutionModeError(
                f"the engine runs in mode {running!r} ({what}{lora}), and this mode is "
                f"{self.effective!r}; {_AT_START}"
            )
        return f"{running}: {what}"

    def explain(self) -> str:
        """Say what runs and why, and the arguments."""
        lines = [f"execution mode {self._requested!r}, effective {self.effective!r}: {self.reason}"]
        lines += [f"  {name}={value!r}" for name, value in self._outcome.arguments.items()]
        return "\n".join(lines)

    def __enter__(self) -> NoReturn:
        raise ExecutionModeError(f"there is no block for vLLM: {_AT_START}")

    def __exit__(self, *exc: object) -> None:
        """Never reached: there is no block."""

    def __repr__(self) -> str:
        return f"<execution mode {self.effective} for vllm: {self.reason}>"


def _compiled(engine: Any) -> int | None:
    """How many modules of an engine in this process are compiled; None of one elsewhere."""
    core = getattr(getattr(engine, "llm_engine", None), "engine_core", None)
    executor = getattr(getattr(core, "engine_core", None), "model_executor", None)
    worker = getattr(getattr(executor, "driver_worker", None), "worker", None)
    if worker is None:
        return None
    modules = worker.model_runner.get_model().modules()
    return sum(getattr(module, "do_not_compile", True) is False for module in modules)
