"""How plugins are called: each by itself, answers checked, blame by name."""

from __future__ import annotations

import types

import pytest

from parallelkit import hooks
from parallelkit.errors import (
    ManifestError,
    PluginContractError,
    PluginError,
    PluginWarning,
    RendezvousTimeoutError,
)
from parallelkit.plugin import (
    DemoSpec,
    ExecutionSpec,
    GroupSpec,
    HostIdentity,
    LaunchSpec,
    Section,
    TransportCandidate,
    TransportRequest,
    hookimpl,
)
from parallelkit.testing.fake import FakeGroup, FakePlugin

SPEC = GroupSpec(
    framework="x",
    backend="memory",
    device="cpu",
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
)
REQUEST = TransportRequest(publisher=HostIdentity(boot_id="b", uid=0, pid=1))


@pytest.fixture
def plug(manager):
    """Register a plugin made of functions."""

    def register(name: str, **functions):
        module = types.ModuleType(f"pk_test_{name}")
        module.parallelkit_api = 1  # type: ignore[attr-defined]
        for hook, function in functions.items():
            setattr(module, hook, hookimpl(function))
        return manager.register(module, name=name)

    return register


def candidate(name: str) -> TransportCandidate:
    return TransportCandidate(name=name, reach=True, cost=1.0, reason="")


class TestCollect:
    def test_one_that_raises_does_not_lose_the_others(self, manager, plug):
        def raises():
            raise ZeroDivisionError("oops")

        plug("a", parallelkit_diagnostics=lambda: [Section(title="a", facts={})])
        plug("b", parallelkit_diagnostics=raises)
        plug("c", parallelkit_diagnostics=lambda: [Section(title="c", facts={})])
        with pytest.warns(PluginWarning, match=r"'b'.*ZeroDivisionError: oops") as record:
            answers, failures = hooks.diagnostics(manager=manager)
        assert [a.plugin.name for a in answers] == ["a", "c"]
        assert [f.plugin.name for f in failures] == ["b"]
        assert len(record) == 1
        assert [f.plugin.name for f in manager.failures] == ["b"]

    def test_one_that_exits_does_not_end_the_program(self, manager, plug):
        def leaves():
            raise SystemExit(3)

        def interrupted():
            raise KeyboardInterrupt

        plug("a", parallelkit_diagnostics=leaves)
        plug("b", parallelkit_diagnostics=lambda: [Section(title="b", facts={})])
        with pytest.warns(PluginWarning, match=r"'a'.*SystemExit: 3"):
            answers, _ = hooks.diagnostics(manager=manager)
        assert [a.plugin.name for a in answers] == ["b"]
        plug("c", parallelkit_diagnostics=interrupted)
        with pytest.raises(KeyboardInterrupt):
            hooks.diagnostics(manager=manager)

    def test_answers_are_checked(self, manager, plug):
        plug("a", parallelkit_transports=lambda: candidate("not in a list"))
        plug("b", parallelkit_transports=lambda: ["text"])
        plug("c", parallelkit_transports=lambda request: [candidate("good")])
        with pytest.warns(PluginWarning) as record:
            found = hooks.transports(REQUEST, manager=manager)
        assert [c.name for c in found] == ["good"]
        assert len(record) == 2

    def test_none_is_no_answer(self, manager, plug):
        plug("a", parallelkit_transports=lambda request: None)
        assert hooks.transports(REQUEST, manager=manager) == []


class TestSelected:
    def test_only_the_winner_is_called(self, manager, plug):
        called = []

        def other(spec):
            called.append(spec)

        plug("aaa", parallelkit_init_process_group=other)
        chosen = manager.register(FakePlugin(), name="fake")
        group = hooks.init_process_group(chosen, SPEC, manager=manager)
        assert isinstance(group, FakeGroup)
        assert called == []

    def test_none_from_the_winner_is_its_bug(self, manager, plug):
        chosen = plug("vendor", parallelkit_init_process_group=lambda spec: None)
        with pytest.raises(PluginContractError, match=r"'vendor'.*answered None"):
            hooks.init_process_group(chosen, SPEC, manager=manager)

    def test_no_such_hook(self, manager, plug):
        chosen = plug("vendor", parallelkit_demo=lambda spec: 0)
        with pytest.raises(PluginContractError, match="has no parallelkit_init_process_group"):
            hooks.init_process_group(chosen, SPEC, manager=manager)

    def test_missing_members_are_listed(self, manager, distributions):
        source = """
            from parallelkit.plugin import hookimpl
            parallelkit_api = 1
            class Half:
                rank = 0
                def barrier(self): ...
            @hookimpl
            def parallelkit_init_process_group(spec):
                return Half()
            """
        distributions.add(
            "vendor",
            "half = pk_test_half_group",
            version="4.2",
            modules={"pk_test_half_group": source},
        )
        manager = distributions.manager()
        (chosen,) = manager.load().loaded
        with pytest.raises(PluginContractError) as caught:
            hooks.init_process_group(chosen, SPEC, manager=manager)
        text = str(caught.value)
        assert "'half' (vendor 4.2)" in text
        assert "Half, which is no ProcessGroup" in text
        for name in ("world_size", "all_reduce", "broadcast_object", "close", "__enter__"):
            assert name in text
        assert "barrier" not in text

    @pytest.mark.parametrize(
        ("hook", "call"),
        [
            (
                "parallelkit_set_execution_mode",
                lambda p, m: hooks.set_execution_mode(p, ExecutionSpec(mode="eager"), manager=m),
            ),
            (
                "parallelkit_launch",
                lambda p, m: hooks.launch(
                    p, LaunchSpec(framework="x", ranks=1, script="s"), manager=m
                ),
            ),
            ("parallelkit_demo", lambda p, m: hooks.demo(p, DemoSpec(), manager=m)),
        ],
    )
    def test_every_answer_is_checked(self, manager, plug, hook, call):
        chosen = plug("vendor", **{hook: lambda spec: "a string"})
        with pytest.raises(PluginContractError, match="'vendor'"):
            call(chosen, manager)

    def test_the_error_of_the_winner_reaches_the_user_with_a_note(self, manager, plug):
        def late(spec):
            raise RendezvousTimeoutError("rank 3 is missing", missing=[3])

        chosen = plug("vendor", parallelkit_init_process_group=late)
        with pytest.raises(RendezvousTimeoutError) as caught:
            hooks.init_process_group(chosen, SPEC, manager=manager)
        assert caught.value.missing == (3,)
        assert "'vendor'" in caught.value.__notes__[0]

    def test_an_implementation_may_leave_out_arguments(self, manager, plug):
        chosen = plug("vendor", parallelkit_demo=lambda: 0)
        assert hooks.demo(chosen, DemoSpec(), manager=manager) == 0

    def test_an_argument_with_a_default_gets_the_value(self, manager, plug):
        got = []

        def demo(spec=None):
            got.append(spec)
            return 0

        chosen = plug("vendor", parallelkit_demo=demo)
        spec = DemoSpec(seed=7)
        hooks.demo(chosen, spec, manager=manager)
        assert got == [spec]


class TestFirstResult:
    def test_the_first_that_answers(self, manager, plug):
        from parallelkit.testing.arrays import Arrays

        plug("a", parallelkit_weight_source=lambda model: None)
        plug("b", parallelkit_weight_source=lambda model: Arrays(model))
        assert isinstance(hooks.weight_source({}, manager=manager), Arrays)

    def test_nobody(self, manager):
        assert hooks.weight_source(object(), manager=manager) is None

    def test_wrong_answer_is_blamed(self, manager, plug):
        plug("vendor", parallelkit_weight_sink=lambda target: target)
        with pytest.raises(PluginContractError, match=r"'vendor'.*no WeightSink"):
            hooks.weight_sink(object(), manager=manager)

    @pytest.mark.parametrize("call", [hooks.weight_source, hooks.weight_sink])
    def test_one_that_raises_is_named(self, manager, plug, call):
        def fails(**given):
            raise error

        functions = {
            "parallelkit_weight_source": lambda model: fails(),
            "parallelkit_weight_sink": lambda target: fails(),
        }
        plug("vendor", **functions)
        for error in (ZeroDivisionError("oops"), SystemExit("oops")):
            name = type(error).__name__
            with pytest.raises(PluginError, match=rf"'vendor'.*{name}: oops") as caught:
                call(object(), manager=manager)
            assert caught.value.__cause__ is error
        error = ManifestError("two tensors share memory")
        with pytest.raises(ManifestError) as kept:
            call(object(), manager=manager)
        assert kept.value is error

    def test_order_is_by_distribution_and_name_and_tryfirst(self, manager):
        order = []

        def plugin(name: str, **options: bool):
            module = types.ModuleType(name)
            module.parallelkit_api = 1  # type: ignore[attr-defined]

            @hookimpl(**options)
            def parallelkit_engine_client(target):
                order.append(name)

            module.parallelkit_engine_client = parallelkit_engine_client  # type: ignore
            return module

        manager.register(plugin("c", trylast=True), name="c")
        manager.register(plugin("e"), name="e")
        manager.register(plugin("d"), name="d")
        manager.register(plugin("z", tryfirst=True), name="z")
        assert hooks.engine_client(object(), {}, manager=manager) is None
        assert order == ["z", "d", "e", "c"]
