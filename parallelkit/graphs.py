"""What graph mode makes of a function: the reports of `check_graph` and `compare_modes`."""

from __future__ import annotations

import json
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class GraphBreak:
    """A place that graph mode cannot take into its graph.

    Attributes:
        construct: what stands there, in plain words: `"call of print()"`, `"Tensor.item()"`.
        reason: why the framework cannot trace it, its own words.
        file, line: where, in the user's code; line 0 where the framework does not say.
        hint: what to do about it; empty where the framework has none.
        source: the line's text, as far as it can be read.
    """

    construct: str
    reason: str
    file: str
    line: int
    hint: str = ""
    source: str = ""

    @property
    def place(self) -> str:
        """`file:line`, as editors take it."""
        return f"{self.file}:{self.line}"


@attrs.frozen(kw_only=True)
class GraphReport:
    """What `check_graph` found.

    Attributes:
        function: the function's or the model's name.
        framework: whose graph mode.
        graphs: how many graphs the call needed; one is the goal.
        operations: operations in these graphs.
        breaks: what keeps the function from being one graph, in the order met.
    """

    function: str
    framework: str
    graphs: int
    operations: int = 0
    breaks: tuple[GraphBreak, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the whole call is one graph."""
        return self.graphs == 1 and not self.breaks

    def to_dict(self) -> dict[str, Any]:
        """Plain values, derived ones included."""
        return attrs.asdict(self) | {"ok": self.ok}

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        count = f"{self.graphs} graph{'' if self.graphs == 1 else 's'}"
        verdict = "one graph" if self.ok else f"{count}, {len(self.breaks)} break(s)"
        lines = [f"{self.function} ({self.framework}): {verdict}, {self.operations} operations"]
        width = max((len(b.construct) for b in self.breaks), default=0)
        for found in self.breaks:
            lines.append(f"  {found.construct:<{width}}  {found.place}  {found.source}".rstrip())
            lines.append(f"  {'':<{width}}  {found.reason}")
            if found.hint:
                lines.append(f"  {'':<{width}}  hint: {found.hint}")
        return "\n".join(lines)


@attrs.frozen(kw_only=True)
class Difference:
    """How far one set of tensors is from another.

    Attributes:
        tensors: how many were compared.
        max_abs: largest absolute difference of two elements; infinite where just one is finite.
        max_rel: a tensor's largest difference over the largest finite element that eager gives
            for it, the largest of all tensors; infinite like `max_abs`.
        worst: name or path of the tensor with `max_abs`; empty if all are equal.
    """

    tensors: int
    max_abs: float = 0.0
    max_rel: float = 0.0
    worst: str = ""


@attrs.frozen(kw_only=True)
class ModeComparison:
    """What `compare_modes` measured.

    Attributes:
        function, framework: what was run, and whose modes.
        reason: how graph mode ran, such as `"torch.compile with inductor"`.
        outputs: graph's outputs against eager's.
        gradients: graph's gradients against eager's; None unless asked for.
        eager_seconds, graph_seconds: each call's wall time, warm, eager and graph in turns.
        compile_seconds: the first call in graph mode, compilation included.
        graphs, recompiles, breaks: as counted over all calls in graph mode; more than no
            recompiles means that the times contain compilations.
        notes: anything the reader should know.
    """

    function: str
    framework: str
    reason: str
    outputs: Difference
    gradients: Difference | None = None
    eager_seconds: tuple[float, ...] = ()
    graph_seconds: tuple[float, ...] = ()
    compile_seconds: float = 0.0
    graphs: int = 0
    recompiles: int = 0
    breaks: int = 0
    notes: tuple[str, ...] = ()

    @property
    def speedup(self) -> float:
        """Median of eager's time over graph's, pair by pair; above 1 graph is faster."""
        return _quantile(self._ratios(), 0.5)

    @property
    def speedup_spread(self) -> tuple[float, float]:
        """First and third quartile of the pairs' speed-ups."""
        ratios = self._ratios()
        return _quantile(ratios, 0.25), _quantile(ratios, 0.75)

    def _ratios(self) -> list[float]:
        pairs = zip(self.eager_seconds, self.graph_seconds, strict=True)
        return sorted(eager / max(graph, 1e-9) for eager, graph in pairs)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, derived ones included."""
        low, high = self.speedup_spread
        return attrs.asdict(self) | {
            "speedup": self.speedup,
            "speedup_spread": [low, high],
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text; a number that is not finite becomes null."""
        return json.dumps(_finite(self.to_dict()), allow_nan=False)

    def __str__(self) -> str:
        low, high = self.speedup_spread
        eager = _quantile(sorted(self.eager_seconds), 0.5)
        graph = _quantile(sorted(self.graph_seconds), 0.5)
        rows = [("outputs", self.outputs)]
        if self.gradients is not None:
            rows.append(("gradients", self.gradients))
        lines = [
            f"{self.function} ({self.framework}): {self.reason}",
            f"  eager {eager * 1e3:.3f} ms, graph {graph * 1e3:.3f} ms, speed-up "
            f"{self.speedup:.2f} (quartiles {low:.2f} to {high:.2f} of {len(self.graph_seconds)})",
            f"  first call in graph mode {self.compile_seconds:.2f} s, {self.graphs} graph(s), "
            f"{self.recompiles} recompile(s), {self.breaks} break(s)",
            "             tensors  largest absolute  largest relative  at",
            *(
                f"  {name:<10} {d.tensors:>7}  {d.max_abs:>16.3e}  {d.max_rel:>16.3e}  {d.worst}"
                for name, d in rows
            ),
            *(f"  note: {note}" for note in self.notes),
        ]
        return "\n".join(line.rstrip() for line in lines)


def _quantile(ordered: list[float], share: float) -> float:
    """Linear interpolation between the two nearest of `ordered`; 0 where there are none."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value
