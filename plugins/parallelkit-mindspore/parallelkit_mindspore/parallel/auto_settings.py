"""Options of modes `semi_auto` and `auto`: checked by name and value, no MindSpore needed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from parallelkit import options as given_options
from parallelkit.errors import UnsupportedFeatureError
from parallelkit.plan import ParallelPlan

#: How a search works, for mode `auto`.
SEARCHES: Final = ("recursive_programming", "sharding_propagation", "dynamic_programming")
APIS: Final = ("auto", "AutoParallel", "context")
DATASET: Final = ("data_parallel", "full_batch")
SCHEDULERS: Final = ("1f1b", "gpipe", "seqpipe", "seqvpp", "seqsmartvpp", "zero_bubble_v")
#: What a search of ours asks for on other frameworks; MindSpore's looks at the graph instead.
IDLE: Final = frozenset(
    {"model", "example", "loss", "global_batch", "microbatches", "optimizer", "memory"}
    | {"reserve", "devices_per_host", "links"}
)
LEVELS: Final = ("level1", "level2", "level3")

_NEEDS: Final = {
    "pipeline_scheduler": "pipeline",
    "optimizer_level": "data_shard",
    "optimizer_threshold": "data_shard",
}


@attrs.frozen(kw_only=True)
class AutoSettings:
    """What `parallel_context("semi_auto" | "auto", ...)` was given besides degrees.

    Attributes:
        mode: `"semi_auto"` or `"auto"`.
        api: `"AutoParallel"`, which wraps a cell, or `"context"`, which sets MindSpore's
            process-wide settings.
        search_mode: how `"auto"` searches; `"semi_auto"` has none.
        layouts: pattern to style or strategy; see `operator_layouts`.
        dataset_strategy: how a batch arrives: `"data_parallel"` (cut over all ranks of a stage),
            `"full_batch"` (whole on every rank), or for each input a tuple of degrees by dim.
        strategy_save, strategy_load: absolute path of a `.json` strategy file, or None; a
            pipeline has a file for each stage (see `files`).
        pipeline_scheduler: order of a pipeline's microbatches.
        optimizer_level, optimizer_threshold: what the parallel optimizer divides, and from how
            many KiB of a parameter on.
        idle: options of other frameworks' searches that were given with `"auto"`, and mean
            nothing here.
    """

    mode: str
    api: str
    search_mode: str | None
    layouts: Mapping[str, Any]
    dataset_strategy: str | tuple[tuple[int, ...], ...]
    strategy_save: str | None
    strategy_load: str | None
    pipeline_scheduler: str
    optimizer_level: str
    optimizer_threshold: int
    idle: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, options: Mapping[str, Any], plan: ParallelPlan, mode: str, pinned: Mapping[str, int]
    ) -> AutoSettings:
        """Check options against mode and plan.

        Args:
            options: as the user gave them.
            pinned: the degrees that the user gave.

        Raises:
            UnsupportedFeatureError: an option is unknown, has a wrong value, or contradicts the
                mode or the degrees.
        """
        names = {a.name for a in attrs.fields(cls)} - {"mode", "idle"}
        names |= IDLE if mode == "auto" else set()
        given = given_options.check(options, names, what=f"mode {mode!r} of the mindspore plugin")
        search = _search(given, mode, pinned)
        layouts = given.get("layouts") or {}
        if not isinstance(layouts, Mapping):
            raise _wrong("layouts", layouts, "a mapping of patterns to styles or strategies")
        if layouts and mode == "auto" and search != "sharding_propagation":
            raise UnsupportedFeatureError(
                f"layouts was given with search_mode={search!r}, which places every operator "
                "itself; search_mode='sharding_propagation' keeps yours and spreads from there"
            )
        for name, axis in _NEEDS.items():
            if name in given and plan.degree(axis) == 1:
                raise UnsupportedFeatureError(
                    f"{name} was given, and the degree of {axis!r} is 1; give {axis}=2 or more"
                )
        threshold = given.get("optimizer_threshold", 64)
        if type(threshold) is not int or threshold < 0:
            raise _wrong("optimizer_threshold", threshold, "a number of KiB, 0 or more")
        return cls(
            mode=mode,
            api=_api(given, search),
            search_mode=search,
            layouts=dict(layouts),
            dataset_strategy=_dataset(given.get("dataset_strategy", "data_parallel"), plan),
            strategy_save=_path("strategy_save", given.get("strategy_save")),
            strategy_load=_path("strategy_load", given.get("strategy_load")),
            pipeline_scheduler=_one_of(given, "pipeline_scheduler", SCHEDULERS),
            optimizer_level=_one_of(given, "optimizer_level", LEVELS),
            optimizer_threshold=threshold,
            idle=tuple(sorted(IDLE & set(given))),
        )

    def context_values(self, plan: ParallelPlan, rank: int, reduce: str) -> dict[str, Any]:
        """Keyword arguments of MindSpore's `set_auto_parallel_context`."""
        values: dict[str, Any] = {
            "parallel_mode": f"{self.mode}_parallel",
            "device_num": plan.world_size,
            "global_rank": rank,
            "gradients_mean": reduce == "mean",
            "pipeline_stages": plan.pipeline,
            "dataset_strategy": self.dataset_strategy,
        }
        if self.search_mode is not None:
            values["search_mode"] = self.search_mode
        if plan.pipeline > 1:
            values["pipeline_config"] = {
                "pipeline_interleave": False,
                "pipeline_scheduler": self.pipeline_scheduler,
            }
        if plan.data_shard > 1:
            values["enable_parallel_optimizer"] = True
            values["parallel_optimizer_config"] = {
                "optimizer_weight_shard_size": plan.data_shard,
                "parallel_optimizer_threshold": self.optimizer_threshold,
                "optimizer_level": self.optimizer_level,
            }
        save, load = self.files(plan, rank)
        if save is not None or load is not None:
            values["strategy_ckpt_config"] = {
                "save_file": save or "",
                "load_file": load or "",
                "only_trainable_params": True,
            }
        return values

    def files(self, plan: ParallelPlan, rank: int) -> tuple[str | None, str | None]:
        """The strategy files that a rank writes and reads; None for none.

        Ranks of a stage compile the same strategies, so its first one writes. Of several stages
        each has a file: `plan.json` becomes `plan-stage0.json`, `plan-stage1.json`.
        """
        stage = plan.coordinates(rank)["pipeline"]
        first = rank % (plan.world_size // plan.pipeline) == 0

        def of_stage(path: str | None) -> str | None:
            if path is None or plan.pipeline == 1:
                return path
            return str(Path(path).with_stem(f"{Path(path).stem}-stage{stage}"))

        return of_stage(self.strategy_save if first else None), of_stage(self.strategy_load)

    def data_parts(self, plan: ParallelPlan) -> int:
        """Into how many parts a batch's dim 0 is cut before it reaches the ranks of a stage."""
        if self.dataset_strategy == "full_batch":
            return 1
        if isinstance(self.dataset_strategy, tuple):
            return max((degrees[0] for degrees in self.dataset_strategy if degrees), default=1)
        return plan.world_size // plan.pipeline

    def lines(self) -> list[str]:
        """What is in force, for `explain()`."""
        said = [f"api: {self.api}"]
        if self.search_mode is not None:
            said.append(f"search: {self.search_mode}")
        said.append(f"batches arrive: {self.dataset_strategy!r}")
        for name in ("strategy_load", "strategy_save"):
            path = getattr(self, name)
            said += [f"{name}: {path}"] if path is not None else []
        return said + [f"not used here: {', '.join(self.idle)}"] * bool(self.idle)


def _search(given: Mapping[str, Any], mode: str, pinned: Mapping[str, int]) -> str | None:
    if mode == "semi_auto":
        if "search_mode" in given:
            raise UnsupportedFeatureError(
                f"search_mode={given['search_mode']!r} was given with mode 'semi_auto', which "
                "searches nothing; use mode 'auto'"
            )
        return None
    fixed = [axis for axis in ("data", "tensor") if pinned.get(axis, 1) > 1]
    if fixed:
        raise UnsupportedFeatureError(
            f"{fixed[0]}={pinned[fixed[0]]} was given with mode 'auto', and MindSpore's search "
            "chooses data and tensor by itself; leave them out, or use mode 'semi_auto'"
        )
    return _one_of(given, "search_mode", SEARCHES)


def _api(given: Mapping[str, Any], search: str | None) -> str:
    api = _one_of(given, "api", APIS)
    only_context = search == "dynamic_programming"
    if only_context and api == "AutoParallel":
        raise UnsupportedFeatureError(
            "search_mode='dynamic_programming' was given with api='AutoParallel', which does not "
            "have it; use api='context', or another search_mode"
        )
    return ("context" if only_context else "AutoParallel") if api == "auto" else api


def _dataset(value: Any, plan: ParallelPlan) -> str | tuple[tuple[int, ...], ...]:
    if isinstance(value, str) and value in DATASET:
        return value
    good = isinstance(value, tuple | list) and all(isinstance(row, tuple | list) for row in value)
    if not good or not value or not all(type(d) is int and d > 0 for row in value for d in row):
        said = f"{' or '.join(map(repr, DATASET))}, or for each input a tuple of degrees by dim"
        raise _wrong("dataset_strategy", value, said)
    ranks = plan.world_size // plan.pipeline
    for row in value:
        product = 1
        for degree in row:
            product *= degree
        if ranks % product:
            raise _wrong(
                "dataset_strategy",
                value,
                f"degrees whose product divides the {ranks} ranks of a pipeline stage",
            )
    return tuple(tuple(row) for row in value)


def _path(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str | Path) or Path(value).suffix != ".json":
        raise _wrong(name, value, "a path that ends in .json")
    path = Path(value).absolute()
    if not path.parent.is_dir():
        raise _wrong(name, value, f"in a folder that exists, and {str(path.parent)!r} does not")
    return str(path)


def _one_of(given: Mapping[str, Any], name: str, allowed: Collection[str]) -> str:
    value = given.get(name, next(iter(allowed)))
    if not isinstance(value, str) or value not in allowed:
        raise _wrong(name, value, f"one of {', '.join(map(repr, allowed))}")
    return value


def _wrong(name: str, value: Any, allowed: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(f"{name} is {value!r:.200}; it is {allowed}")
