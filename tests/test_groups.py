"""Life of the default group, on a backend that is made up."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

import parallelkit as pk
from parallelkit import groups
from parallelkit.errors import (
    AlreadyInitializedError,
    DeviceError,
    ExecutionModeError,
    GroupError,
    LaunchError,
    NoBackendError,
    NotInitializedError,
    PlanError,
    PluginContractError,
    RankMismatchError,
    UnknownBackendError,
    UnsupportedFeatureError,
)
from parallelkit.protocols import ExecutionMode, ParallelContext, ProcessGroup
from parallelkit.testing.fake import FEATURES, FakePlugin


@pytest.fixture(autouse=True)
def _clean(clean_launch):
    clean_launch()


@pytest.fixture
def plugin(manager) -> FakePlugin:
    made = FakePlugin()
    manager.register(made, name="fake")
    return made


def init(manager, *args, **kwargs):
    return pk.init_process_group(*args, manager=manager, **kwargs)


class TestLife:
    def test_a_world_of_one(self, manager, plugin):
        with init(manager) as group:
            assert isinstance(group, ProcessGroup)
            assert (group.rank, group.world_size, group.local_rank) == (0, 1, 0)
            assert (group.framework, group.backend, group.device) == ("fake", "memory", "cpu")
            assert group.timeout == 60.0
            assert pk.current_group() is group
            assert not group.closed
            assert group.native is plugin.groups[0]
        assert group.closed
        assert plugin.groups[0].closes == 1

    def test_collectives_go_straight_through(self, manager, plugin):
        with init(manager) as group:
            group.barrier(timeout=1)
            assert group.all_reduce(3) == 3
            assert group.broadcast(3, 0) == 3
            assert group.all_gather(3) == [3]
            assert group.reduce_scatter(3) == 3
            assert group.broadcast_object({"a": 1}) == {"a": 1}
            assert group.subgroup([0]) is not None

    def test_a_rank_before_init_is_an_error(self):
        with pytest.raises(NotInitializedError, match="init_process_group"):
            pk.current_group()

    def test_after_the_last_close_there_is_none(self, manager, plugin):
        init(manager).close()
        with pytest.raises(NotInitializedError):
            pk.current_group()

    def test_init_again_after_close(self, manager, plugin):
        init(manager).close()
        with init(manager, device="cpu"):
            assert len(plugin.groups) == 2

    def test_closing_twice_is_harmless(self, manager, plugin):
        group = init(manager)
        group.close()
        group.close()
        assert plugin.groups[0].closes == 1

    def test_same_init_twice_is_the_same_group_and_the_last_close_closes(self, manager, plugin):
        first = init(manager)
        second = init(manager)
        assert first is second
        assert len(plugin.groups) == 1
        second.close()
        assert not first.closed
        assert pk.current_group() is first
        first.close()
        assert first.closed

    @pytest.mark.parametrize(
        "same",
        [
            {"framework": "fake"},
            {"backend": "memory"},
            {"device": "cpu"},
            {"rank": 0, "world_size": 1},
            {"timeout": 60.0},
        ],
    )
    def test_saying_what_was_detected_is_the_same(self, manager, plugin, same):
        with init(manager) as first, init(manager, **same) as second:
            assert first is second

    @pytest.mark.parametrize(
        ("other", "shown"),
        [
            ({"framework": "torch"}, ("framework='fake'", "framework='torch'")),
            ({"backend": "nccl"}, ("backend='memory'", "backend='nccl'")),
            ({"device": "cuda"}, ("device='cpu'", "device='cuda'")),
            ({"world_size": 2}, ("world_size=1", "world_size=2")),
            ({"timeout": 5.0}, ("timeout=60.0", "timeout=5.0")),
        ],
    )
    def test_another_spec_is_an_error_that_shows_both(self, manager, plugin, other, shown):
        with init(manager) as group:
            with pytest.raises(AlreadyInitializedError) as caught:
                init(manager, **other)
            for part in shown:
                assert part in str(caught.value)
            assert pk.current_group() is group
        assert group.closed  # the refused call was not counted

    def test_the_default_timeout_agrees_with_any(self, manager, plugin):
        with init(manager, timeout=5.0) as first, init(manager) as second:
            assert second is first
            assert second.timeout == 5.0

    def test_a_plugin_that_closes_by_itself(self, manager, plugin):
        init(manager)
        plugin.groups[0].close()
        with pytest.raises(NotInitializedError):
            pk.current_group()
        with init(manager) as group:
            assert group.native is plugin.groups[1]

    def test_what_a_plugin_has_beyond_the_protocol(self, manager, plugin):
        with init(manager) as group:
            assert group.spec.framework == "fake"
            assert group.peers == {}
            with pytest.raises(AttributeError):
                group.nothing_like_it  # noqa: B018

    def test_a_failed_init_leaves_nothing(self, manager):
        class Failing(FakePlugin):
            from parallelkit.plugin import hookimpl

            @hookimpl
            def parallelkit_init_process_group(self, spec):
                raise GroupError("no network")

        manager.register(Failing(), name="failing")
        with pytest.raises(GroupError, match="no network"):
            init(manager)
        with pytest.raises(NotInitializedError):
            pk.current_group()

    def test_a_wrong_answer_is_blamed(self, manager):
        class Wrong(FakePlugin):
            from parallelkit.plugin import hookimpl

            @hookimpl
            def parallelkit_init_process_group(self, spec):
                return object()

        manager.register(Wrong(), name="wrong")
        with pytest.raises(PluginContractError, match="'wrong'"):
            init(manager)

    def test_nothing_there(self, manager):
        with pytest.raises(NoBackendError):
            init(manager)

    def test_unknown_framework_and_backend(self, manager, plugin):
        with pytest.raises(UnknownBackendError, match="did you mean 'fake'"):
            init(manager, "fakee")
        with pytest.raises(UnknownBackendError, match="memory on cpu"):
            init(manager, backend="nccl")

    @pytest.mark.parametrize(
        "timeout", [0, -1, float("nan"), float("inf"), "x", None, True, 1e300, 10**400]
    )
    def test_timeout_is_checked(self, manager, plugin, timeout):
        with pytest.raises(GroupError, match="timeout"):
            init(manager, timeout=timeout)

    def test_types_of_names_are_checked(self, manager, plugin):
        for name in ("framework", "backend"):
            for value in (None, 5):
                with pytest.raises(UnknownBackendError, match=f"{name} is {value}"):
                    init(manager, **{name: value})
        for value in (None, 5):
            with pytest.raises(DeviceError, match=f"device is {value}"):
                init(manager, device=value)
        with pytest.raises(UnknownBackendError, match="framework is None"):
            pk.execution_mode("eager", framework=None, manager=manager)

    def test_a_frameworks_device_object_is_taken(self, manager, plugin):
        class Device:
            type = "cpu"

            def __str__(self):
                return self.type

        with init(manager, device=Device()) as group, init(manager, device=Device()) as again:
            assert again is group
            assert group.device == "cpu"

    def test_environment_is_left_alone(self, manager, plugin):
        before = dict(os.environ)
        with init(manager):
            assert dict(os.environ) == before
        assert dict(os.environ) == before


class TestPlace:
    def test_the_launcher_decides(self, manager, clean_launch):
        made = FakePlugin(devices=("gpu", "cpu"), peers=echo(2))
        manager.register(made, name="fake")
        clean_launch(
            RANK="1",
            WORLD_SIZE="2",
            LOCAL_RANK="1",
            LOCAL_WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="29511",
        )
        with init(manager) as group:
            assert (group.rank, group.world_size) == (1, 2)
            assert group.device == "gpu:1"
            assert group.backend == "wire"
            assert made.groups[0].spec.master_port == 29511

    def test_arguments_beat_the_launcher(self, manager, clean_launch):
        made = FakePlugin(peers=echo(4))
        manager.register(made, name="fake")
        clean_launch(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
        with init(manager, rank=3, world_size=4) as group:
            assert (group.rank, group.world_size) == (3, 4)

    @pytest.mark.parametrize(
        "variables",
        [
            {"RANK": "0"},
            {"RANK": "abc", "WORLD_SIZE": "2"},
            {"RANK": "2", "WORLD_SIZE": "2"},
            {"RANK": "-1", "WORLD_SIZE": "2"},
        ],
    )
    def test_partial_and_malformed_variables(self, manager, plugin, clean_launch, variables):
        clean_launch(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", **variables)
        with pytest.raises(LaunchError, match="RANK"):
            init(manager)
        assert plugin.groups == []

    def test_the_scheduler_of_msrun_has_no_rank(self, manager, plugin, clean_launch):
        scheduler = {"MS_ROLE": "MS_SCHED", "MS_SCHED_HOST": "127.0.0.1"}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            scheduler["MS_SCHED_PORT"] = str(probe.getsockname()[1])
        clean_launch(MS_WORKER_NUM="2", **scheduler)
        with pytest.raises(LaunchError, match="scheduler .* fake has no use for it"):
            init(manager, framework="fake")
        with pytest.raises(SystemExit) as ended:  # it serves, and no worker comes
            init(manager, timeout=0.3)
        assert ended.value.code == 1
        clean_launch(MS_WORKER_NUM="1", **scheduler)
        with pytest.raises(SystemExit) as ended:  # one worker meets nobody
            init(manager)
        assert ended.value.code == 0
        assert plugin.groups == []

    def test_a_device_with_an_index(self, manager):
        made = FakePlugin(devices=("gpu", "cpu"))
        manager.register(made, name="fake")
        with init(manager, device="gpu:3") as group:
            assert group.device == "gpu:3"
            assert init(manager, device="gpu") is group
            group.close()


def echo(n: int):
    """Peers that hold the same as this rank."""
    return {rank: (lambda obj: obj) for rank in range(n)}


class TestRanksAgree:
    def start(self, manager, clean_launch, peers, n: int = 2, rank: int = 0):
        manager.register(FakePlugin(peers=peers), name="fake")
        clean_launch(
            RANK=str(rank),
            WORLD_SIZE=str(n),
            LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE=str(n),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="29511",
        )
        return init(manager)

    def test_equal(self, manager, clean_launch):
        self.start(manager, clean_launch, echo(2)).close()

    def test_another_version_is_a_table_by_rank(self, manager, clean_launch):
        def other(mine):
            return mine | {"plugins": [*mine["plugins"], "extra (vendor 2.0)"]}

        with pytest.raises(RankMismatchError) as caught:
            self.start(manager, clean_launch, {1: other})
        text = str(caught.value)
        assert "rank 0: besides the common plugins, none" in text
        assert "rank 1: besides the common plugins, extra (vendor 2.0)" in text
        with pytest.raises(NotInitializedError):
            pk.current_group()

    def test_another_winner(self, manager, clean_launch):
        def other(mine):
            return mine | {"winner": "torch by torch (parallelkit-torch 0.0.9)"}

        with pytest.raises(RankMismatchError, match=r"rank 1: winner .*parallelkit-torch 0.0.9"):
            self.start(manager, clean_launch, {1: other})

    def test_the_group_is_closed_after_a_mismatch(self, manager, clean_launch):
        plugin = FakePlugin(peers={1: lambda mine: mine | {"backend": "other"}})
        manager.register(plugin, name="aaa")
        clean_launch(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
        with pytest.raises(RankMismatchError, match="backend"):
            init(manager)
        assert plugin.groups[0].closed

    def test_many_ranks_send_one_digest(self, manager, clean_launch):
        calls = []

        def count(obj):
            calls.append(obj)
            return obj

        self.start(manager, clean_launch, dict.fromkeys(range(1000), count), n=1000).close()
        assert len(calls) == 1

    def test_many_ranks_notice_too(self, manager, clean_launch):
        def zero(mine):
            return ["another digest", mine[1] | {"backend": "other"}]

        with pytest.raises(RankMismatchError, match="rank 0: backend 'other'"):
            self.start(manager, clean_launch, {0: zero}, n=1000, rank=5)


class TestContext:
    def test_needs_a_group(self):
        with pytest.raises(NotInitializedError):
            pk.parallel_context()

    def test_what_is_no_group(self, manager, plugin):
        for value in ("x", 5):
            with pytest.raises(GroupError, match="group is"):
                pk.parallel_context(group=value, manager=manager)

    def test_on_the_open_group(self, manager, plugin):
        with init(manager) as group:
            context = pk.parallel_context(reduce="sum")
            assert isinstance(context, ParallelContext)
            assert context.group is group
            assert context.mode == "standalone"
            assert context.reduce == "sum"
            assert context.plan == pk.plan(1)
            assert "fake context" in str(pk.explain())

    def test_on_a_given_group(self, manager, plugin):
        with init(manager) as group:
            context = pk.parallel_context(group=group.native, manager=manager)
            assert context.group is group.native

    def test_a_mode_that_is_not_there_fails_by_name_with_what_is(self, manager, plugin):
        with init(manager):
            with pytest.raises(UnsupportedFeatureError) as caught:
                pk.parallel_context("auto")
            assert "'auto'" in str(caught.value)
            assert "data, standalone" in str(caught.value)

    def test_fallback_is_left_to_the_plugin(self, manager, plugin):
        with init(manager):
            context = pk.parallel_context("auto", fallback=True)
            assert context.spec.fallback

    def test_an_axis_that_is_not_there(self, manager, clean_launch):
        features = FEATURES | {"context.hybrid"}
        manager.register(FakePlugin(features=features, peers=echo(4)), name="fake")
        clean_launch(RANK="0", WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
        with init(manager):
            with pytest.raises(UnsupportedFeatureError, match=r"axis.tensor.*supports data"):
                pk.parallel_context(tensor=2)
            with pytest.raises(UnsupportedFeatureError, match=r"axis.tensor"):
                pk.parallel_context(tensor=2, fallback=True)

    def test_degrees_are_checked_first(self, manager, plugin):
        with init(manager):
            with pytest.raises(PlanError):
                pk.parallel_context(tensor=3)
            with pytest.raises(PlanError, match="'avg'"):
                pk.parallel_context(reduce="avg")

    def test_options_reach_the_plugin(self, manager, plugin):
        with init(manager):
            assert pk.parallel_context(bucket=3).spec.options == {"bucket": 3}


class TestPlannedAhead:
    """A plan that is given to `init_process_group` is checked before anything is opened."""

    def test_a_plan_that_fits_is_the_contexts_default(self, manager, plugin):
        with init(manager, plan=pk.plan(1)) as group:
            assert group.plan == pk.plan(1)
            assert pk.parallel_context().plan == pk.plan(1)

    @pytest.mark.parametrize(
        ("plan", "error", "match"),
        [
            (pk.plan(2), PlanError, r"for 2 ranks, and 1 were started"),
            (pk.plan(1, offset=2), PlanError, "begins at rank 2 of a wider world"),
            ({"tensor": 2}, PlanError, "what pk.plan returned"),
            (pk.plan(1, "auto"), UnsupportedFeatureError, "'auto'"),
        ],
    )
    def test_what_cannot_run_opens_nothing(self, manager, plugin, plan, error, match):
        with pytest.raises(error, match=match):
            init(manager, plan=plan)
        assert plugin.groups == []

    def test_an_axis_that_is_not_there(self, manager, clean_launch):
        fake = FakePlugin(features=FEATURES | {"context.hybrid"}, peers=echo(4))
        manager.register(fake, name="fake")
        clean_launch(RANK="0", WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
        with pytest.raises(UnsupportedFeatureError, match=r"axis.tensor.*supports data"):
            init(manager, plan=pk.plan(4, tensor=2))
        assert fake.groups == []

    def test_another_plan_for_an_open_group(self, manager, plugin):
        features = FEATURES | {"context.hybrid"}
        manager.register(FakePlugin("wide", features=features, score=99), name="wide")
        with init(manager, plan=pk.plan(1)):
            with pytest.raises(AlreadyInitializedError, match=r"hybrid"):
                init(manager, plan=pk.plan(1, "hybrid"))
            init(manager, plan=pk.plan(1)).close()

    def test_a_plan_for_the_context(self, manager, plugin):
        with init(manager):
            assert pk.parallel_context(plan=pk.plan(1, "data")).mode == "data"
            with pytest.raises(PlanError, match="for 2 ranks, and the group has 1"):
                pk.parallel_context(plan=pk.plan(2))
            with pytest.raises(PlanError, match="begins at rank 3 of a wider world"):
                pk.parallel_context(plan=pk.plan(1, offset=3))
            with pytest.raises(PlanError, match="together with tensor=1"):
                pk.parallel_context(plan=pk.plan(1), tensor=1)
            with pytest.raises(PlanError, match="what pk.plan returned"):
                pk.parallel_context(plan="data")


class TestExecution:
    @pytest.mark.parametrize("mode", ["eager", "graph"])
    def test_without_a_group(self, manager, plugin, mode):
        execution = pk.execution_mode(mode, manager=manager)
        assert isinstance(execution, ExecutionMode)
        assert execution.requested == mode
        assert execution.spec.framework == "fake"

    def test_of_the_open_group(self, manager, plugin):
        manager.register(FakePlugin("better", score=99), name="better")
        with init(manager, "fake"):
            assert pk.execution_mode("eager").spec.framework == "fake"
            other = pk.execution_mode("eager", framework="better")
            assert other.spec.framework == "better"

    def test_an_unknown_mode(self, manager):
        with pytest.raises(ExecutionModeError, match="'quick'"):
            pk.execution_mode("quick", manager=manager)

    def test_a_mode_that_is_not_there(self, manager):
        manager.register(FakePlugin(features=frozenset({"execution.eager"})), name="fake")
        with pytest.raises(UnsupportedFeatureError, match=r"'graph'.*supports eager"):
            pk.execution_mode("graph", manager=manager)
        assert pk.execution_mode("graph", fallback=True, manager=manager).spec.fallback


class TestExplain:
    def test_before_and_after(self, manager, plugin):
        before = pk.explain(manager=manager)
        assert "none is open" in str(before)
        with init(manager):
            text = str(pk.explain())
        assert "fake (registered here): loaded" in text
        assert "always there" in text
        assert "<group fake/memory on cpu, rank 0 of 1>" in text
        assert "world_size" in text

    def test_a_contradictory_launcher_is_shown(self, manager, clean_launch):
        clean_launch(RANK="5", WORLD_SIZE="2")
        assert "cannot be read" in pk.explain(manager=manager).launch

    def test_as_rich_and_as_json(self, manager, plugin):
        import io
        import json

        from rich.console import Console

        with init(manager):
            explanation = pk.explain()
        out = io.StringIO()
        Console(file=out, width=200).print(explanation)
        assert "always there" in out.getvalue()
        assert json.loads(json.dumps(explanation.as_dict()))["selections"]


def test_reset_closes_however_often_it_was_opened(manager, plugin):
    init(manager)
    init(manager)
    groups.reset()
    assert plugin.groups[0].closed
    assert groups.open_group() is None


def test_a_group_left_open_is_closed_at_exit_in_silence():
    code = """
import parallelkit as pk
from parallelkit.testing.fake import FakePlugin, FakeGroup
close = FakeGroup.close
FakeGroup.close = lambda self: (print("closed"), close(self))
pk.register(FakePlugin(), "fake")
pk.init_process_group("fake")
pk.init_process_group("fake")
print("end")
"""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split() == ["end", "closed"]
