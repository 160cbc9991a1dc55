"""Parts of the weight suite: a model is published here, and followed in another process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np

import parallelkit as pk
from parallelkit.errors import ManifestError, StateError, UpdateTimeoutError, VersionError
from parallelkit.protocols import WeightSink, WeightSource
from parallelkit.testing.conformance import reference
from parallelkit.testing.conformance.follower import Follower, build, digests
from parallelkit.testing.conformance.parts import (
    Case,
    Parts,
    main,
    raises,
    sink_of,
    source_of,
)

BOTH: Final = ("weights.source", "weights.sink")
SECONDS: Final = 60.0

PARTS: Final = Parts()


@PARTS.part(needs=BOTH)
def manifests(case: Case) -> None:
    """Source and sink name the same tensors, in order, with dtype, shape and tie."""
    expected = [(n, "float32", w.shape, None) for n, w in reference.mlp_weights().items()]
    assert facts(case, "mlp") == expected
    for dtype in case.adapter.model_dtypes:
        found = facts(case, "mlp", dtype)
        assert found == [(n, dtype, shape, None) for n, _, shape, _ in expected]
    tied = {name: (shape, alias) for name, _, shape, alias in facts(case, "tied")}
    assert set(tied) == {"embed.weight", "body.weight", "head.weight"}
    assert tied["head.weight"] == ((11, 6), "embed.weight")


@PARTS.part(needs=BOTH)
def bytes_in_and_out(case: Case) -> None:
    """What is written into a sink's model is what a source of it reads, bit for bit."""
    for dtype in case.adapter.model_dtypes:
        model = build(case.adapter, "mlp", dtype, 0)
        sink = sink_of(case, model)
        source = source_of(case, model)
        random = np.random.RandomState(3)
        sent: list[bytes] = []
        sink.begin()
        for index, spec in enumerate(sink.needs().unique):
            data = random.bytes(spec.nbytes)
            sent.append(data)
            live = sink.destination(index)
            if live is None:
                sink.write(index, memoryview(data))
            else:
                live[:] = data
        sink.finish()
        source.begin()
        for index, data in enumerate(sent):
            assert bytes(sink.host_bytes(index)) == data, f"sink, {dtype}, tensor {index}"
            assert bytes(source.host_bytes(index)) == data, f"source, {dtype}, tensor {index}"


@PARTS.part(needs=BOTH)
def followed(case: Case) -> None:
    """A follower in another process has every version, bit for bit, ties included."""
    with Follower(case.reference, case.home) as follower:
        models = [("mlp", dtype) for dtype in case.adapter.model_dtypes]
        for kind, dtype in (*models, ("tied", "float32")):
            model = build(case.adapter, kind, dtype, 0)
            with publishing(model, follower, kind, dtype) as publisher:
                for version in (1, 2, 3):
                    changed = change(case, model, version)
                    follower.send(do="step", timeout=SECONDS)
                    report = publisher.update()
                    assert report.version == version
                    said = follower.answer()
                    assert said == {
                        "version": version,
                        "state": "current",
                        "digests": digests(case.adapter, model),
                    }, f"{kind} {dtype} after {changed}: {said}"
                raises(VersionError, partial(publisher.update, version=3), "3")
            raises(StateError, publisher.update, "close")


@PARTS.part(needs=BOTH)
def other_models_are_refused(case: Case) -> None:
    """A target of other names, shapes or dtypes joins nothing, and is told the differences."""
    with Follower(case.reference, case.home) as follower:
        model = build(case.adapter, "mlp", "float32", 0)
        other = next(d for d in case.adapter.model_dtypes if d != "float32")
        with pk.publish_weights(model, timeout=SECONDS) as publisher:
            for kind, dtype, said in (
                ("scale", "float32", "first.weight"),
                ("tied", "float32", "head.weight"),
                ("mlp", other, other),
            ):
                answer = follower.ask(
                    do="join", kind=kind, dtype=dtype, seed=1, ticket=publisher.new_ticket()
                )
                assert answer.get("error") == "ManifestMismatchError", answer
                assert said in answer["message"], answer


@PARTS.part(needs=BOTH)
def changed_models_are_refused(case: Case) -> None:
    """A model that is not what was published updates nobody; the follower stays as it was."""
    with Follower(case.reference, case.home) as follower:
        model = build(case.adapter, "mlp", "float32", 0)
        with publishing(model, follower, "mlp", "float32") as publisher:
            follower.send(do="step", timeout=SECONDS)
            publisher.update()
            before = follower.answer()
            case.adapter.retype(model)
            raises(ManifestError, publisher.update)
            answer = follower.ask(do="step", timeout=0.2)
            assert answer["error"] == UpdateTimeoutError.__name__, answer
            after = follower.ask(do="look")
            assert (after["version"], after["digests"]) == (1, before["digests"])


def facts(case: Case, kind: str, dtype: str = "float32") -> list[Any]:
    """Name, dtype, shape and tie of each tensor, alike for source and sink."""
    model = build(case.adapter, kind, dtype, 0)
    source = source_of(case, model)
    sink = sink_of(case, model)
    assert isinstance(source, WeightSource)
    assert isinstance(sink, WeightSink)
    assert source.manifest() == sink.needs()
    assert source.device == sink.device == "cpu"
    return [(t.name, t.dtype, t.shape, t.alias_of) for t in source.manifest().tensors]


@contextmanager
def publishing(
    model: Any, follower: Follower, kind: str, dtype: str
) -> Iterator[pk.WeightPublisher]:
    """Publish a model, with the follower joined by one of its kind and other values."""
    with pk.publish_weights(model, timeout=SECONDS) as publisher:
        follower.send(do="join", kind=kind, dtype=dtype, seed=9, ticket=publisher.ticket)
        said = follower.answer()
        assert said.get("version") == 0, said
        publisher.wait(1, timeout=SECONDS)
        yield publisher
        follower.ask(do="leave")


def change(case: Case, model: Any, version: int) -> str:
    """Give one parameter, another at each version, other values; returns its name."""
    parameters = case.adapter.parameters(model)
    name = sorted(parameters)[version % len(parameters)]
    values = np.random.RandomState(version).randn(*parameters[name].shape)
    case.adapter.set_parameter(model, name, values.astype(np.float32))
    return name


if __name__ == "__main__":
    main(PARTS)
