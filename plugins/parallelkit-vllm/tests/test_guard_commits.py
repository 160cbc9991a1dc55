"""The guard's own routes: a commit is whole, resumed on every path, or the engine is shut off."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import STEPS, Answer, FakeApp, FakeEngine, ask
from parallelkit_vllm import commit as committing
from parallelkit_vllm import door, guard, wire
from parallelkit_vllm.guard import Guard

sys.path.pop(0)

TOKEN = "0123456789abcdef0123456789abcdef"
OWNER = "ab" * 16
OTHER = "cd" * 16


class Rig:
    """A guarded app with its engine, attached by OWNER unless told otherwise."""

    def __init__(self, members: int = 1) -> None:
        self.engine = FakeEngine(members)
        self.app = FakeApp(self.engine)
        self.guard = Guard(self.app)

    async def ask(self, path: str, *args: Any, **kwargs: Any) -> Answer:
        return await ask(self.guard, path, *args, state=self.app, **kwargs)

    async def own(self, name: str, *, owner: str = OWNER, **fields: Any) -> Answer:
        return await self.ask(f"/parallelkit/{name}", {"owner": owner, **fields}, token=TOKEN)

    async def attach(self, owner: str = OWNER) -> Answer:
        return await self.own("init", owner=owner, ticket="pk1:secret", timeout=5.0)

    async def commit(self, version: int, **fields: Any) -> Answer:
        return await self.own("commit", version=version, **({"timeout": 5.0} | fields))

    async def status(self) -> dict[str, Any]:
        answer = await self.ask("/parallelkit/status", token=TOKEN)
        assert answer.status == 200
        return dict(answer.json)

    async def generate(self, count: int, answer: Answer | None = None) -> Answer:
        return await self.ask("/v1/completions", {"count": count}, answer=answer)

    def begin_stream(self, count: int) -> tuple[asyncio.Task[Answer], Answer]:
        answer = Answer()
        return asyncio.ensure_future(self.generate(count, answer)), answer


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(wire.TOKEN_VARIABLE, TOKEN)
    monkeypatch.setattr(committing, "RECOVERY_SECONDS", 0.4)
    monkeypatch.setattr("parallelkit_vllm.service.RECOVERY_SECONDS", 0.4)
    monkeypatch.setattr("parallelkit_vllm.service._STATUS_SECONDS", 0.2)
    monkeypatch.setattr(door, "_LEAVING_SECONDS", 0.3)


def run(main: Callable[[Rig], Awaitable[None]], *, attach: bool = True, members: int = 1) -> None:
    async def whole() -> None:
        rig = Rig(members)
        if attach:
            assert (await rig.attach()).status == 200
        rig.engine.calls.clear()
        await asyncio.wait_for(main(rig), 30)

    asyncio.run(whole())


async def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + 5
    while not true():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


def test_a_commit_from_begin_to_end():
    async def main(rig):
        assert (await rig.own("begin", version=1, lease=5.0)).status == 200
        assert (await rig.status())["under_way"] == "an update to version 1"
        rig.engine.calls.clear()
        answer = await rig.commit(1)
        assert answer.status == 200, answer.body
        assert rig.engine.calls == list(STEPS)
        told = answer.json
        assert told["cache"] == "reset"
        assert told["weight_version"] == "1"
        assert 0 < told["pause_seconds"] < 5
        assert rig.engine.arguments["pause_generation"] == {"mode": "keep", "clear_cache": True}
        assert rig.engine.arguments["reset_prefix_cache"] == {"reset_running_requests": True}
        sent = rig.engine.arguments["update_weights"]
        assert sent["version"] == 1
        assert 0 < sent["timeout"] < 5.0
        status = await rig.status()
        assert status["state"] == "serving"
        assert (status["version"], status["weight_version"]) == (1, "1")
        assert status["owner"] == OWNER
        assert not status.get("under_way")
        assert (await rig.generate(3)).lines == [[0, 1], [1, 1], [2, 1]]

    run(main)


@pytest.mark.parametrize("pause", ["keep", "wait", "abort"])
@pytest.mark.parametrize("cache", ["reset", "keep"])
def test_the_policies_reach_the_engine(pause, cache):
    async def main(rig):
        answer = await rig.commit(1, cache=cache, pause=pause)
        assert answer.json["cache"] == ("reset" if cache == "reset" else "kept")
        told = rig.engine.arguments["pause_generation"]
        assert told == {"mode": pause, "clear_cache": cache == "reset"}
        assert ("reset_prefix_cache" in rig.engine.calls) == (cache == "reset")

    run(main)


def test_requests_in_flight_go_on_and_new_ones_wait():
    async def main(rig):
        assert (await rig.commit(1)).status == 200
        gate = rig.engine.hang["update_weights"] = asyncio.Event()
        task, answer = rig.begin_stream(60)
        await until(lambda: len(answer.lines) > 5)
        commit = asyncio.ensure_future(rig.commit(2))
        await until(lambda: "update_weights" in rig.engine.calls[8:])
        before = len(answer.lines)
        late, _ = rig.begin_stream(4)
        await asyncio.sleep(0.05)
        assert len(answer.lines) == before  # paused
        gate.set()
        assert (await commit).status == 200
        lines = (await task).lines
        assert answer.complete
        assert lines == [[i, 1 if i < before else 2] for i in range(60)]
        assert (await late).lines == [[i, 2] for i in range(4)]
        assert not rig.engine.errored

    run(main)


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_fails(step):
    """Resumed, nothing of no version comes out, and the next commit brings it back."""

    async def main(rig):
        assert (await rig.commit(1)).status == 200
        rig.engine.calls.clear()
        task, stream = rig.begin_stream(10**6)
        await until(lambda: len(stream.lines) > 2)
        rig.engine.fail[step] = RuntimeError("shelf collapsed")
        answer = await rig.commit(2)
        assert answer.status == 500
        problem = answer.json["error"]
        assert problem["type"] == "EngineCommitError"
        expected = {"pause_generation": "pause", "resume_generation": "resume"}.get(step, step)
        assert problem["step"] == expected
        assert "shelf collapsed" in problem["message"]
        # what was in flight ended, as vLLM ends it, and none of its tokens is of torn weights
        lines = (await task).lines
        assert lines[-1] == ["abort", None]
        assert {weights for _, weights in lines[:-1]} <= {1, 2}
        assert rig.engine.calls[-1] == "resume_generation"
        assert not rig.engine.paused
        assert not rig.engine.open
        assert not rig.engine.errored
        refused = await rig.generate(3)
        assert refused.status == 503
        assert "quarantined" in refused.message
        assert "shelf collapsed" in refused.message
        status = await rig.status()
        assert status["state"] == "quarantined"
        assert status["version"] == 1
        assert (await rig.ask("/health")).status == 200
        assert (await rig.ask("/v1/models")).status == 200
        # and back
        assert (await rig.own("begin", version=3, lease=5.0)).status == 200
        assert (await rig.commit(3)).status == 200
        assert (await rig.generate(2)).lines == [[0, 3], [1, 3]]
        assert (await rig.status())["state"] == "serving"

    run(main)


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_hangs(step):
    """Ends at the deadline, by name; the engine resumes as soon as it can; nothing overtakes."""

    async def main(rig):
        assert (await rig.commit(1)).status == 200
        rig.engine.calls.clear()
        gate = rig.engine.hang[step] = asyncio.Event()
        began = time.monotonic()
        answer = await rig.commit(2, timeout=0.3)
        assert time.monotonic() - began < 0.3 + 3 * 0.4 + 1
        assert answer.status == 504, answer.body
        assert answer.json["error"]["type"] == "UpdateTimeoutError"
        name = {"pause_generation": "pause", "resume_generation": "resume"}.get(step, step)
        assert name in answer.message
        assert (await rig.generate(3)).status == 503
        # a new one does not begin behind the one that hangs
        answer = await rig.own("begin", version=3, lease=5.0)
        assert answer.status == 409
        assert name in answer.message
        assert (await rig.commit(3)).status == 409
        gate.set()
        await until(lambda: not rig.engine._line.locked())
        await asyncio.sleep(0.05)
        assert not rig.engine.paused
        assert (await rig.own("begin", version=3, lease=5.0)).status == 200
        assert (await rig.commit(3)).status == 200
        assert (await rig.generate(1)).lines == [[0, 3]]
        assert not rig.engine.errored

    run(main)


def test_one_rank_of_two_fails():
    """The other rank's update is open still; it is closed, so that the next one can begin."""

    async def main(rig):
        engine = rig.engine
        plain = engine.update_weights

        async def torn(request):
            if request.update_info["version"] == 1:
                engine.calls.append("update_weights")
                engine.weights = -1
                raise RuntimeError("rank 1: out of memory")  # open stays True: rank 0's
            await plain(request)

        engine.update_weights = torn
        assert (await rig.commit(1)).status == 500
        assert not engine.open
        assert (await rig.commit(2)).status == 200
        assert (await rig.generate(1)).lines == [[0, 2]]

    run(main, members=2)


def test_an_engine_that_reports_another_version():
    async def main(rig):
        async def other():
            return "7"

        rig.engine.get_weight_version = other
        answer = await rig.commit(1)
        assert answer.status == 500
        assert "'7'" in answer.message
        assert (await rig.generate(1)).status == 503

    run(main)


def test_a_cache_that_is_not_reset():
    async def main(rig):
        async def no(reset_running_requests=False):
            return False

        rig.engine.reset_prefix_cache = no
        answer = await rig.commit(1)
        assert answer.status == 500
        assert answer.json["error"]["step"] == "reset_prefix_cache"
        assert (await rig.generate(1)).status == 503

    run(main)


def test_a_vllm_without_weight_versions():
    """Before 0.27: the guard keeps the version."""

    class Old(FakeEngine):
        def __getattribute__(self, name):
            if name == "get_weight_version":
                raise AttributeError(name)
            return super().__getattribute__(name)

        async def finish_weight_update(self):
            await self._step("finish_weight_update")
            self.open = False

        async def reset_prefix_cache(self):
            await self._step("reset_prefix_cache")
            return True

    async def main(rig):
        rig.engine.__class__ = Old
        answer = await rig.commit(4)
        assert answer.status == 200, answer.body
        assert answer.json.get("weight_version", "") == ""
        assert "0.27" in answer.json["notes"][0]
        assert (await rig.status())["weight_version"] == "4"

    run(main)


def test_the_engine_dies_in_a_commit():
    async def main(rig):
        async def die(request):
            rig.engine.errored = True
            raise RuntimeError("core gone")

        rig.engine.update_weights = die
        answer = await rig.commit(1)
        assert answer.status == 503
        assert answer.json["error"]["type"] == "PeerLostError"
        status = await rig.status()
        assert status["state"] == "dead"
        assert "the engine core died" in status["reason"]
        answer = await rig.own("begin", version=2, lease=1.0)
        assert answer.json["error"]["type"] == "PeerLostError"

    run(main)


def test_a_caller_that_goes_away_in_the_middle():
    async def main(rig):
        gate = rig.engine.hang["update_weights"] = asyncio.Event()
        commit = asyncio.ensure_future(rig.commit(1))
        await until(lambda: "update_weights" in rig.engine.calls)
        commit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await commit
        assert rig.engine.paused
        assert "the commit of version 1" in (await rig.status())["under_way"]
        gate.set()
        await until(lambda: not rig.engine.paused)
        await asyncio.sleep(0.01)
        status = await rig.status()
        assert (status["version"], status["state"]) == (1, "serving")
        rig.engine.calls.clear()
        again = await rig.commit(1)  # asked again: the same answer, and nothing is done
        assert again.status == 200
        assert again.json["weight_version"] == "1"
        assert rig.engine.calls == []

    run(main)


def test_two_commits_at_once():
    async def main(rig):
        gate = rig.engine.hang["update_weights"] = asyncio.Event()
        first = asyncio.ensure_future(rig.commit(1))
        await until(lambda: "update_weights" in rig.engine.calls)
        second = await rig.commit(2)
        assert second.status == 409
        assert "the commit of version 1 is under way" in second.message
        assert (await rig.attach(OTHER)).status == 409
        gate.set()
        assert (await first).status == 200
        assert rig.engine.calls == list(STEPS)
        assert (await rig.commit(2)).status == 200

    run(main)


def test_versions_do_not_go_back():
    async def main(rig):
        assert (await rig.commit(5)).status == 200
        rig.engine.calls.clear()
        answer = await rig.commit(4)
        assert answer.status == 409
        assert answer.json["error"]["type"] == "VersionError"
        assert rig.engine.calls == []

    run(main)


@pytest.mark.parametrize("how", ["sleeping", "paused"])
def test_a_sleeping_or_paused_engine_takes_no_update(how):
    async def main(rig):
        setattr(rig.engine, how, True)
        for answer in (await rig.own("begin", version=1, lease=5.0), await rig.commit(1)):
            assert answer.status == 409
            assert answer.json["error"]["type"] == "StateError"
            assert "asleep or paused" in answer.message
        assert rig.engine.calls == []  # and it is left as it was
        assert getattr(rig.engine, how)

    run(main)


def test_only_the_publisher_that_is_attached():
    async def main(rig):
        for name, fields in (
            ("begin", {"version": 1, "lease": 5.0}),
            ("commit", {"version": 1, "timeout": 5.0}),
            ("abort", {"version": 1}),
            ("quarantine", {"reason": "x"}),
        ):
            answer = await rig.own(name, owner=OTHER, **fields)
            assert answer.status == 409
            assert "another publisher" in answer.message
        assert rig.engine.calls == []
        assert (await rig.generate(1)).status == 200

    run(main)


def test_nobody_is_attached():
    async def main(rig):
        answer = await rig.commit(1)
        assert answer.status == 409
        assert "no publisher" in answer.message
        assert rig.engine.calls == []

    run(main, attach=False)


def test_a_new_publisher_begins_at_no_version():
    async def main(rig):
        assert (await rig.commit(5)).status == 200
        assert (await rig.attach(OTHER)).status == 200
        assert (await rig.own("commit", owner=OTHER, version=1, timeout=5.0)).status == 200
        assert (await rig.status())["version"] == 1
        assert (await rig.commit(6)).status == 409

    run(main)


def test_joining():
    async def main(rig):
        answer = await rig.attach()
        assert answer.json == {"members": 4}
        told = rig.engine.arguments["init_weight_transfer_engine"]
        assert told["ticket"] == "pk1:secret"
        assert 0 < told["timeout"] < 5.0
        rig.engine.fail["init_weight_transfer_engine"] = RuntimeError("shapes differ: lm_head")
        answer = await rig.attach(OTHER)
        assert answer.status == 500
        assert "shapes differ: lm_head" in answer.message
        assert "secret" not in answer.message
        assert (await rig.status())["owner"] == OWNER  # the former one stays
        rig.engine.hang["init_weight_transfer_engine"] = asyncio.Event()
        answer = await rig.own("init", owner=OTHER, ticket="x", timeout=0.2)
        assert answer.status == 504

    run(main, attach=False, members=4)


def test_nothing_disturbs_an_update(monkeypatch):
    async def main(rig):
        paths = sorted(guard.DISTURBING)
        assert (await rig.own("begin", version=1, lease=0.3)).status == 200
        for path in paths:
            answer = await rig.ask(path, token=TOKEN, method="POST")
            assert answer.status == 409, path
            assert "version 1" in answer.message
        assert rig.app.seen == []
        assert (await rig.ask("/is_paused", token=TOKEN)).status == 200
        gate = rig.engine.hang["update_weights"] = asyncio.Event()
        commit = asyncio.ensure_future(rig.commit(1))
        await until(lambda: "update_weights" in rig.engine.calls)
        await asyncio.sleep(0.35)  # the lease is over, the commit is not
        assert (await rig.ask("/resume", token=TOKEN, method="POST")).status == 409
        gate.set()
        assert (await commit).status == 200
        assert (await rig.ask("/resume", token=TOKEN, method="POST")).status == 200
        # called off
        assert (await rig.own("begin", version=2, lease=60.0)).status == 200
        assert (await rig.ask("/pause", token=TOKEN, method="POST")).status == 409
        assert (await rig.own("abort", version=2, reason="no")).status == 200
        assert (await rig.ask("/pause", token=TOKEN, method="POST")).status == 200
        # a publisher that died after its begin: its lease runs out
        assert (await rig.own("begin", version=3, lease=0.2)).status == 200
        assert (await rig.ask("/pause", token=TOKEN, method="POST")).status == 409
        await asyncio.sleep(0.25)
        assert (await rig.ask("/pause", token=TOKEN, method="POST")).status == 200

    run(main)


def test_quarantine_by_the_publisher():
    async def main(rig):
        assert (await rig.commit(1)).status == 200
        task, stream = rig.begin_stream(10**6)
        await until(lambda: len(stream.lines) > 2)
        assert (await rig.own("quarantine", reason="rank 1 is gone")).status == 200
        assert (await task).lines[-1] == ["abort", None]
        for path in ("/v1/completions", "/v1/chat/completions", "/v2/chat", "/inference/v1/x"):
            answer = await rig.ask(path, {"count": 1})
            assert answer.status == 503, path
            assert "rank 1 is gone" in answer.message
            assert answer.json["error"]["code"] == 503
        answer = await rig.ask("/tokenize", {}, token=TOKEN)
        assert answer.status == 503
        socket = await rig.ask("/v1/realtime", kind="websocket")
        assert socket.messages[0]["type"] == "websocket.close"
        for path in ("/health", "/ping", "/version", "/v1/models"):
            assert (await rig.ask(path)).status == 200
        assert not rig.engine.paused
        assert (await rig.commit(2)).status == 200
        assert (await rig.generate(1)).lines == [[0, 2]]

    run(main)


def test_quarantine_in_the_middle_of_a_commit_is_not_lifted_by_it():
    async def main(rig):
        gate = rig.engine.hang["update_weights"] = asyncio.Event()
        commit = asyncio.ensure_future(rig.commit(1))
        await until(lambda: "update_weights" in rig.engine.calls)
        assert (await rig.own("quarantine", reason="too slow")).status == 200
        assert "resume_generation" not in rig.engine.calls  # that would kill the engine now
        gate.set()
        await commit
        assert (await rig.generate(1)).status == 503
        assert not rig.engine.paused
        assert not rig.engine.errored
        assert (await rig.commit(2)).status == 200
        assert (await rig.generate(1)).status == 200

    run(main)


def test_a_request_on_its_way_to_the_engine_is_ended_too():
    """It passed the guard before, and would reach the engine after what is in flight was ended."""

    async def main(rig):
        rig.app.before = asyncio.Event()
        task, _ = rig.begin_stream(10)
        await until(lambda: rig.app.seen)
        assert (await rig.own("quarantine", reason="torn")).status == 200
        answer = await asyncio.wait_for(task, 5)
        assert answer.status == 503
        assert "torn" in answer.message
        assert rig.engine.requests == {}

    run(main)


def test_a_stream_that_cannot_be_ended_well_does_not_look_whole():
    async def main(rig):
        async def stuck(count):
            yield 0, 1
            await asyncio.Event().wait()

        rig.engine.generate = stuck
        task, stream = rig.begin_stream(10)
        await until(lambda: stream.lines)
        assert (await rig.own("quarantine", reason="torn")).status == 200
        answer = await asyncio.wait_for(task, 5)
        assert answer.status == 200
        assert not answer.complete

    run(main)


def test_a_client_that_hangs_up_is_no_quarantine():
    async def main(rig):
        task, stream = rig.begin_stream(10**6)
        await until(lambda: stream.lines)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await rig.status()).get("requests", 0) == 0
        assert (await rig.generate(1)).status == 200

    run(main)


def test_status_of_an_engine_that_does_not_answer():
    async def main(rig):
        rig.engine.hang["get_weight_version"] = asyncio.Event()
        status = await rig.status()
        assert status.get("weight_version") is None
        assert status["state"] == "serving"

    run(main)


def test_a_pause_that_is_left_of_a_failed_commit_is_ended():
    """Resuming failed too: the next begin does it, and does not take the engine for asleep."""

    async def main(rig):
        rig.engine.fail["update_weights"] = RuntimeError("torn")
        rig.engine.fail["resume_generation"] = RuntimeError("busy")
        assert (await rig.commit(1)).status == 500
        assert rig.engine.paused
        assert (await rig.own("begin", version=2, lease=5.0)).status == 200
        assert (await rig.commit(2)).status == 200
        assert (await rig.generate(1)).lines == [[0, 2]]

    run(main)


def test_an_update_that_is_open_by_vllms_own_routes():
    async def main(rig):
        async def post(path, status=200):
            rig.app.status = status
            assert (await rig.ask(path, {}, token=TOKEN)).status == status

        for opening in ("/start_weight_update", "/start_draft_weight_update"):
            for closing, status in (("/finish_weight_update", 200), ("/update_weights", 500)):
                await post(opening, 500)
                assert (await rig.own("begin", version=1, lease=0.01)).status == 200
                await asyncio.sleep(0.02)
                await post(opening)
                await post("/update_weights")
                for answer in (await rig.own("begin", version=1, lease=1.0), await rig.commit(1)):
                    assert answer.status == 409
                    assert "/finish_weight_update ends it" in answer.message
                await post(closing, status)
        assert rig.engine.calls == []
        assert (await rig.commit(1)).status == 200

    run(main)


def test_a_commit_that_is_cancelled_resumes():
    """By itself, without the service, which never cancels one."""

    async def main():
        engine, entry = FakeEngine(), door.TaskDoor()
        engine.hang["update_weights"] = gate = asyncio.Event()
        end = time.monotonic() + 5.0
        call = committing.commit(engine, 1, cache="reset", pause="keep", deadline=end, door=entry)
        task = asyncio.ensure_future(call)
        await until(lambda: "update_weights" in engine.calls)
        task.cancel()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.calls[-1] == "resume_generation"
        assert not engine.paused
        assert not engine.open
        assert "CancelledError" in entry.reason

    asyncio.run(main())
