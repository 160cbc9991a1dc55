"""Whole updates by a loader: through publisher, plan, digests and both phases of the commit."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

import parallelkit as pk
from parallelkit.errors import (
    ManifestMismatchError,
    PartialCommitError,
    QuarantinedError,
    UnsupportedFeatureError,
    WeightTransferError,
)
from parallelkit.testing.arrays import Arrays

sys.path.insert(0, str(Path(__file__).parent))
from engines import Engine, Sizes, Tree, checkpoint, state

sys.path.pop(0)

JOB = Path(__file__).parents[1] / "jobs" / "loaded_follower.py"


def change(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()


def step(publisher: pk.WeightPublisher, follower: pk.WeightSubscriber) -> pk.TransferReport:
    """One update, the follower in this thread; returns the publisher's report."""
    reports: list[pk.TransferReport] = []
    thread = threading.Thread(target=lambda: reports.append(publisher.update()))
    thread.start()
    try:
        follower.step(20)
    finally:
        thread.join(30)
    return reports[0]


def test_a_default_device_does_not_move_what_is_on_the_way() -> None:
    model, follows = nn.Linear(3, 2), nn.Linear(3, 2)
    change(model, 1)

    def load(named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            follows.get_parameter(name).data.copy_(tensor * 2 if name == "bias" else tensor)

    with pk.publish_weights(model, timeout=20) as publisher:
        with pk.subscribe_weights(follows, publisher.ticket, loader=load) as follower:
            with torch.device("meta"):
                assert step(publisher, follower).members[0].state == "committed"
    assert torch.equal(follows.weight, model.weight)
    assert torch.equal(follows.bias, model.bias * 2)


@pytest.mark.parametrize("verify", ["digest", "readback"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_follows_a_trainer_of_other_names(verify: str, dtype: torch.dtype) -> None:
    sizes = Sizes(experts=2, ranks=2)
    model, engine, twin = Tree(checkpoint(sizes)), Engine(sizes, dtype), Engine(sizes, dtype)
    with pk.publish_weights(model, timeout=20, verify=verify) as publisher:
        with pk.subscribe_weights(engine, publisher.ticket, loader=engine.load_weights) as follower:
            for seed in range(3):
                change(model, seed)
                report = step(publisher, follower)
                assert report.members[0].state == "committed"
                said = report.members[0].verified
                read = verify == "readback" and dtype == torch.float32  # what is cast is not
                assert said.startswith("live memory; staged" if read else "staged bytes"), said
                with torch.no_grad():
                    twin.load_weights(model.named_parameters(remove_duplicate=False))
                with follower.use() as current:
                    assert dict(state(current)) == dict(state(twin))
            assert "0 by the loader" in follower.explain()
            assert "verified: staged bytes" in follower.explain()


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(
    ("commit", "transport"), [("in_place", "shm"), ("staged", "tcp"), ("in_place", "tcp")]
)
def test_by_every_way_that_bytes_come(commit: str, transport: str, recorded: bool) -> None:
    model, engine, twin = Tree(checkpoint()), Engine(), Engine()

    def loader(weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        return engine.load_weights((n, w if recorded else w * 1) for n, w in weights)

    options = {"commit": commit, "transport": transport, "verify": "readback", "keep_last": True}
    with pk.publish_weights(model, timeout=20, **options) as publisher:
        change(model, 0)
        publisher.update()
        with pk.subscribe_weights(engine, publisher.ticket, loader=loader) as follower:
            for seed in range(3):
                if seed:
                    change(model, seed)
                    step(publisher, follower)
                else:  # what was kept from before it came
                    follower.step(20)
                with torch.no_grad():
                    twin.load_weights(model.named_parameters(remove_duplicate=False))
                with follower.use() as current:
                    assert dict(state(current)) == dict(state(twin))
            assert ("goes through aten.mul" in follower.explain()) != recorded


@pytest.mark.parametrize("verify", ["digest", "readback"])
def test_in_a_thread_of_its_own_until_it_is_used(verify: str) -> None:
    model, engine, twin = Tree(checkpoint()), Engine(), Engine()
    with pk.publish_weights(model, timeout=20, verify=verify) as publisher:
        with pk.subscribe_weights(engine, publisher.ticket, loader=engine.load_weights) as follower:
            follower.serve()
            for seed in range(3):
                before = dict(state(engine))
                change(model, seed)
                publisher.update()
                assert dict(state(engine)) == before
                with torch.no_grad():
                    twin.load_weights(model.named_parameters(remove_duplicate=False))
                with follower.use():
                    assert dict(state(engine)) == dict(state(twin))


def test_what_the_engine_lacks_is_an_error_at_both_ends_and_nothing_is_touched() -> None:
    tensors = checkpoint()
    del tensors["layers.0.up_proj.weight"]
    engine = Engine()
    before = dict(state(engine))
    with pk.publish_weights(Tree(tensors), timeout=20) as publisher:
        with pytest.raises(
            ManifestMismatchError, match=r"'layers.0.gate_up_proj.weight'.*rows 6:12"
        ):
            pk.subscribe_weights(engine, publisher.ticket, loader=engine.load_weights)
        deadline, notes = time.monotonic() + 20, ""
        while "refused, the loader does not bring" not in notes and time.monotonic() < deadline:
            notes += " ".join(publisher.update().notes)  # once the refusal has arrived
            time.sleep(0.05)
    assert "refused, the loader does not bring" in notes
    assert dict(state(engine)) == before


def test_a_loader_that_fails_quarantines_until_it_works_again() -> None:
    model, engine = Tree(checkpoint()), Engine()
    broken = False

    def loader(weights: object) -> object:
        if broken:
            raise OSError("no space")
        return engine.load_weights((n, w * 1) for n, w in weights)  # type: ignore[attr-defined]

    with pk.publish_weights(model, timeout=20) as publisher:
        with pk.subscribe_weights(engine, publisher.ticket, loader=loader) as follower:
            step(publisher, follower)
            assert "goes through aten.mul" in follower.explain()
            broken = True
            change(model, 5)
            errors: list[PartialCommitError] = []

            def update() -> None:
                try:
                    publisher.update()
                except PartialCommitError as error:
                    errors.append(error)

            thread = threading.Thread(target=update)
            thread.start()
            with pytest.raises(QuarantinedError, match="LoaderError.*no space"):
                follower.step(20)
            thread.join(30)
            assert "no space" in str(errors[0].report)
            with pytest.raises(QuarantinedError), follower.use():
                pass
            broken = False
            step(publisher, follower)
            with follower.use():
                bias = model.get_parameter("layers.1.norm.bias")
                assert torch.equal(engine.get_parameter("layers.1.norm.bias"), bias)


def test_who_cannot_place_by_a_loader_says_so() -> None:
    with pk.publish_weights(nn.Linear(1, 1), timeout=20) as publisher:
        with pytest.raises(UnsupportedFeatureError, match=r"into a Arrays by a loader"):
            pk.subscribe_weights(Arrays({}), publisher.ticket, loader=print)
        with pytest.raises(WeightTransferError, match="loader is 'load_weights'"):
            pk.subscribe_weights(Engine(), publisher.ticket, loader="load_weights")  # type: ignore[arg-type]
        linear = nn.Linear(1, 1)
        with pk.subscribe_weights(linear, publisher.ticket) as follower:
            assert follower.explain() == "2 tensors, each placed under its own name"


@pytest.mark.ranks
def test_two_processes() -> None:
    sizes = Sizes(experts=2, ranks=2, rank=1)
    model, twin = Tree(checkpoint(sizes)), Engine(sizes, torch.bfloat16)
    with pk.publish_weights(model, timeout=60, verify="readback") as publisher:
        with subprocess.Popen(
            [sys.executable, JOB], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(publisher.ticket + "\n")
                process.stdin.flush()
                publisher.wait(1, timeout=60)
                for seed in range(3):
                    change(model, seed)
                    publisher.update()
                    said = json.loads(process.stdout.readline())
                    with torch.no_grad():
                        twin.load_weights(model.named_parameters(remove_duplicate=False))
                    held = {name: hashlib.sha256(data).hexdigest() for name, data in state(twin)}
                    assert said == {"version": seed + 1, "held": held}
                assert "0 by the loader" in json.loads(process.stdout.readline())["explain"]
                process.stdin.close()
                assert process.wait(60) == 0
            finally:
                process.kill()


class Quantised(nn.Module):
    """One layer that fuses and quantises what arrives under three names, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(6, 4, dtype=torch.int8), requires_grad=False)
        self.scales = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.fails = False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for count, (name, weight) in enumerate(weights):
            if self.fails and count == 2:
                raise OSError("no space")
            part = "abc".index(name)
            scale = weight.abs().max() / 127
            self.scales.data[part] = scale
            self.rows.data[2 * part : 2 * part + 2] = (weight / scale).round().to(torch.int8)


def test_a_quantised_layer_of_which_two_of_three_tensors_came_is_right_after_the_next_update() -> (
    None
):
    model = Tree({name: torch.ones(2, 4) for name in "abc"})
    engine, twin = Quantised(), Quantised()
    with pk.publish_weights(model, timeout=20) as publisher:
        with pk.subscribe_weights(engine, publisher.ticket, loader=engine.load_weights) as follower:
            change(model, 1)
            step(publisher, follower)
            before = dict(state(engine))
            engine.fails = True
            change(model, 2)
            errors: list[PartialCommitError] = []

            def update() -> None:
                try:
                    publisher.update()
                except PartialCommitError as error:
                    errors.append(error)

            failed = threading.Thread(target=update)
            failed.start()
            with pytest.raises(QuarantinedError, match="no space"):
                follower.step(20)
            failed.join(30)
            assert "no space" in str(errors[0].report)
            assert dict(state(engine)) != before, "it failed in the middle"
            with pytest.raises(QuarantinedError), follower.use():
                pass
            engine.fails = False
            change(model, 3)
            step(publisher, follower)
            with torch.no_grad():
                twin.load_weights(model.named_parameters())
            with follower.use() as current:
                assert dict(state(current)) == dict(state(twin))
