"""The guard: who may ask for what. Plain ASGI with an engine that is made up."""

from __future__ import annotations

import asyncio
import hmac
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import FakeApp, FakeEngine, ask
from parallelkit_vllm import asgi, guard, wire
from parallelkit_vllm.guard import Guard

sys.path.pop(0)

TOKEN = "0123456789abcdef0123456789abcdef"
OWNER = "ab" * 16
ADMIN = [
    "/abort_requests",
    "/collective_rpc",
    "/docs",
    "/finish_weight_update",
    "/get_world_size",
    "/init_weight_transfer_engine",
    "/invocations",
    "/is_paused",
    "/is_sleeping",
    "/metrics",
    "/openapi.json",
    "/pause",
    "/release_kv_cache_memory",
    "/reset_encoder_cache",
    "/reset_mm_cache",
    "/reset_prefix_cache",
    "/resume",
    "/scale_elastic_ep",
    "/server_info",
    "/shutdown_weight_transfer_engine",
    "/sleep",
    "/start_draft_weight_update",
    "/start_profile",
    "/start_weight_update",
    "/tokenize",
    "/update_weight_version",
    "/update_weights",
    "/wake_up",
    "/weight_checker",
    "/weight_info",
    "/",
    "",
    "/v1x",
    "/v1/../pause",
    "/healthz",
    "//v1/models",
    "/a/v1/models",
    "/HEALTH",
]
OPEN = ["/health", "/ping", "/version", "/v1", "/v1/models", "/v1/chat/completions", "/v2/embed"]
OWN = ["status", "init", "begin", "commit", "abort", "quarantine", "other", ""]


class Rig:
    """A guarded app with its engine."""

    def __init__(self, args: Any = None) -> None:
        self.engine = FakeEngine()
        self.app = FakeApp(self.engine, args)
        self.guard = Guard(self.app)

    async def ask(self, path: str, *args: Any, **kwargs: Any) -> Any:
        return await ask(self.guard, path, *args, state=self.app, **kwargs)


@pytest.fixture(autouse=True)
def the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(wire.TOKEN_VARIABLE, TOKEN)


@pytest.mark.parametrize("path", ADMIN)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD"])
def test_every_other_route_needs_the_token(path, method):
    async def main():
        rig = Rig()
        wrong = [None, "", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), b"\xff\x00", "k" * 4000]
        for token in wrong:
            answer = await rig.ask(path, token=token, method=method)
            assert answer.status == 401, (path, token)
            assert answer.headers["www-authenticate"] == "Bearer"
            assert wire.TOKEN_VARIABLE in answer.message
            assert TOKEN not in answer.message
        assert rig.app.seen == []
        answer = await rig.ask(path, token=TOKEN, method=method)
        assert answer.status == 200
        assert rig.app.seen == [path]

    asyncio.run(main())


@pytest.mark.parametrize("name", OWN)
def test_our_own_routes_need_it_too(name):
    async def main():
        rig = Rig()
        for path in (f"/parallelkit/{name}", f"/parallelkit/{name}/"):
            assert (await rig.ask(path, {"owner": OWNER})).status == 401
            assert (await rig.ask(path, method="GET")).status == 401
        assert rig.engine.calls == []

    asyncio.run(main())


def test_the_header_must_be_one_and_a_bearer():
    async def main():
        rig = Rig()
        good = (b"authorization", b"Bearer " + TOKEN.encode())
        refused = [
            [(b"authorization", b"Basic " + TOKEN.encode())],
            [(b"authorization", TOKEN.encode())],
            [(b"authorization", b"Bearer")],
            [(b"authorization", b"Bearer  " + TOKEN.encode())],
            [(b"x-authorization", b"Bearer " + TOKEN.encode())],
            [good, good],
            [(b"authorization", b"Bearer the-api-key"), good],
        ]
        for headers in refused:
            assert (await rig.ask("/pause", headers=headers)).status == 401, headers
        for headers in ([good], [(b"Authorization", b"bearer " + TOKEN.encode())]):
            assert (await rig.ask("/pause", headers=headers)).status == 200

    asyncio.run(main())


def test_tokens_are_compared_in_constant_time(monkeypatch):
    """By the library's function, on digests: neither length nor place of a difference shows."""
    seen = []

    def compare(a, b):
        seen.append((len(a), len(b)))
        return hmac.compare_digest(a, b)

    monkeypatch.setattr(asgi, "hmac", SimpleNamespace(compare_digest=compare))

    async def main():
        rig = Rig()
        for token in ("", "x", TOKEN[:-1] + "0", "y" * 3000, TOKEN):
            await rig.ask("/pause", token=token)

    asyncio.run(main())
    assert seen == [(32, 32)] * 5


@pytest.mark.parametrize("path", OPEN)
def test_liveness_and_users_routes_pass(path):
    async def main():
        rig = Rig()
        assert (await rig.ask(path)).status == 200
        assert (await rig.ask(path, token="the-users-api-key-that-is-none-of-ours")).status == 200
        assert rig.app.seen == [path] * 2

    asyncio.run(main())


@pytest.mark.parametrize(
    ("root", "path", "status"),
    [
        ("/base", "/base/v1/models", 200),
        ("/base", "/base/health", 200),
        ("/base", "/base/pause", 401),
        ("/v1", "/v1/pause", 401),
        ("/v1", "/v1pause", 401),
        ("/v1", "/v1", 401),
        ("/health", "/healthpause", 401),
        ("/base", "/pause", 401),
    ],
)
def test_under_a_root_path_the_routers_rule_holds(root, path, status):
    async def main():
        assert (await Rig().ask(path, root_path=root)).status == status

    asyncio.run(main())


def test_the_path_is_taken_apart_as_the_router_does():
    routing = pytest.importorskip("starlette._utils")
    for root in ("", "/", "/v1", "/base", "/base/"):
        for path in ("", "/", "/v1", "/v1/x", "/v1x", "/base/pause", "/base", "/pause", "//v1"):
            scope = {"path": path, "root_path": root}
            assert asgi.route_path(scope) == routing.get_route_path(scope), scope


@pytest.mark.parametrize(
    ("token", "what"),
    [
        (None, "no token"),
        ("", "no token"),
        ("short", "5 characters"),
        (" " * 20, "blanks"),
        ("ü" * 20, "ASCII"),
        ("a" * 15 + "\n" + "a" * 8, "ASCII"),
    ],
)
def test_without_a_good_token_the_server_does_not_start(monkeypatch, token, what):
    if token is None:
        monkeypatch.delenv(wire.TOKEN_VARIABLE)
    else:
        monkeypatch.setenv(wire.TOKEN_VARIABLE, token)

    async def main():
        rig = Rig()
        sent = await lifespan(rig)
        assert sent[0]["type"] == "lifespan.startup.failed"
        assert "parallelkit_vllm.Guard" in sent[0]["message"]
        assert what in sent[0]["message"]
        assert "openssl rand -hex 32" in sent[0]["message"]
        assert not rig.app.started
        for path in ("/health", "/v1/models", "/pause", "/parallelkit/status"):
            assert (await rig.ask(path, token=token or "")).status == 503
        assert rig.app.seen == []

    asyncio.run(main())


def test_with_one_it_starts():
    async def main():
        rig = Rig(SimpleNamespace(api_server_count=1))
        assert [x["type"] for x in await lifespan(rig)] == ["lifespan.startup.complete"]
        assert rig.app.started

    asyncio.run(main())


def test_several_api_servers_are_refused():
    async def main():
        rig = Rig(SimpleNamespace(api_server_count=4))
        (sent,) = await lifespan(rig)
        assert sent["type"] == "lifespan.startup.failed"
        assert "--api-server-count is 4" in sent["message"]
        assert (await rig.ask("/v1/models")).status == 503

    asyncio.run(main())


async def lifespan(rig: Rig) -> list[Any]:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message)

    await rig.guard({"type": "lifespan", "app": rig.app}, receive, send)
    return sent


INIT = {"owner": OWNER, "ticket": "pk1:xyz", "timeout": 5.0}
BODIES: dict[str, dict[str, Any]] = {
    "init": INIT,
    "begin": {"owner": OWNER, "version": 1, "lease": 5.0},
    "commit": {"owner": OWNER, "version": 1, "timeout": 5.0},
    "abort": {"owner": OWNER, "version": 1, "reason": "x"},
    "quarantine": {"owner": OWNER, "reason": "x"},
}


@pytest.mark.parametrize("name", BODIES)
def test_bad_bodies_are_refused(name):
    good = BODIES[name]
    bad: list[tuple[bytes | dict[str, Any], str]] = [
        (b"", "JSON|truncated"),
        (b"{", "truncated"),
        (b"\xff\xfe", "JSON|utf-8|invalid"),
        (b"[]", "array"),
        (b"null", "null"),
        (b"[" * 10000, "."),
        (good | {"extra": 1}, "unknown field `extra`"),
        (good | {"owner": "AB" * 16}, "owner"),
        (good | {"owner": 5}, "owner"),
        ({k: v for k, v in good.items() if k != "owner"}, "missing required field `owner`"),
    ]
    for field in ("version", "timeout", "lease", "ticket", "reason"):
        if field in good:
            values = [True, [], "x" * 10000]
            if field not in ("ticket", "reason"):
                values += ["1", -1, 0]
            bad += [(good | {field: value}, field) for value in values]
    if name == "commit":
        bad += [(good | {"cache": "drop"}, "cache"), (good | {"pause": None}, "pause")]
        bad += [(good | {"timeout": 1e9}, "timeout"), (good | {"version": 2**70}, "version")]

    async def main():
        rig = Rig()
        for body, pattern in bad:
            answer = await rig.ask(f"/parallelkit/{name}", body, token=TOKEN, method="POST")
            assert answer.status == 400, (body, answer.body)
            assert re.search(pattern, answer.message), (body, answer.message)
            assert answer.json["error"]["type"] == "ProtocolError"
        assert rig.engine.calls == []

    asyncio.run(main())


def test_long_bodies_are_cut_off_before_they_are_read():
    async def main():
        rig = Rig()
        long = b"x" * (wire.MAX_BODY + 1)
        answer = await rig.ask("/parallelkit/init", long, token=TOKEN)
        assert answer.status == 413
        headers = [(b"content-length", b"9" * 40)]
        chunk = {"type": "http.request", "body": b"x" * 4096, "more_body": True}
        answer = await rig.ask(
            "/parallelkit/init", token=TOKEN, method="POST", headers=headers, chunks=[chunk]
        )
        assert answer.status == 413
        chunks = [dict(chunk) for _ in range(100)]
        answer = await rig.ask("/parallelkit/init", token=TOKEN, method="POST", chunks=chunks)
        assert answer.status == 413
        # without the token nothing is read at all
        answer = await rig.ask("/parallelkit/init", method="POST", chunks=[60.0])
        assert answer.status == 401
        assert rig.engine.calls == []

    asyncio.run(main())


def test_a_slow_body_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(asgi, "BODY_SECONDS", 0.2)

    async def main():
        rig = Rig()
        drip = {"type": "http.request", "body": b"{", "more_body": True}
        chunks = [0.05, drip] * 20
        answer = await rig.ask("/parallelkit/init", token=TOKEN, method="POST", chunks=chunks)
        assert answer.status == 408

    asyncio.run(main())


def test_a_caller_that_goes_in_the_middle_of_its_body_gets_nothing():
    async def main():
        rig = Rig()
        chunks = [
            {"type": "http.request", "body": b"{", "more_body": True},
            {"type": "http.disconnect"},
        ]
        answer = await rig.ask("/parallelkit/init", token=TOKEN, method="POST", chunks=chunks)
        assert answer.messages == []
        assert rig.engine.calls == []

    asyncio.run(main())


def test_routes_and_methods_of_ours():
    async def main():
        rig = Rig()
        answer = await rig.ask("/parallelkit/update", {}, token=TOKEN)
        assert answer.status == 404
        assert "commit" in answer.message
        answer = await rig.ask("/parallelkit/commit", token=TOKEN, method="GET")
        assert answer.status == 405
        assert answer.headers["allow"] == "POST"
        answer = await rig.ask("/parallelkit/status", {}, token=TOKEN)
        assert answer.status == 405
        assert (await rig.ask("/parallelkit", token=TOKEN)).status == 404
        assert rig.app.seen == []

    asyncio.run(main())


def test_a_server_without_an_engine():
    async def main():
        rig = Rig()
        rig.app.state.engine_client = None
        answer = await rig.ask("/parallelkit/status", token=TOKEN)
        assert answer.status == 503
        assert "no engine" in answer.message

    asyncio.run(main())


def test_web_sockets_are_guarded_too():
    async def main():
        rig = Rig()
        answer = await rig.ask("/other", kind="websocket")
        assert answer.messages == [{"type": "websocket.close", "code": 1008, "reason": ""}]
        answer = await rig.ask("/parallelkit/status", kind="websocket", token=TOKEN)
        assert answer.messages[0]["type"] == "websocket.close"
        answer = await rig.ask("/v1/realtime", kind="websocket")
        assert answer.messages == [{"type": "websocket.accept"}]
        assert rig.app.seen == ["/v1/realtime"]

    asyncio.run(main())


def test_an_unknown_kind_of_connection_is_refused():
    async def main():
        rig = Rig()
        with pytest.raises(asgi.RequestError, match="telepathy"):
            await rig.guard({"type": "telepathy"}, None, None)
        assert rig.app.seen == []

    asyncio.run(main())


def test_the_lists_agree():
    """What may disturb an update is never a route that needs no token."""
    assert not [path for path in guard.DISTURBING if guard.is_open(path)]
    assert guard.DISTURBING <= guard.HARMLESS
