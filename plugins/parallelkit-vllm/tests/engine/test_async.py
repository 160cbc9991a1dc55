"""An `AsyncLLM` that generates while it takes updates, from a publisher in the same process."""

from __future__ import annotations

import asyncio
import threading
import time
import warnings

import pytest
import tiny_qwen as tiny

import parallelkit as pk
from parallelkit.errors import PartialCommitError, QuarantinedError, UpdateAbortedError

SECONDS = 60.0
TOKENS = 120


class Rollouts:
    """An engine on an event loop in a thread of its own."""

    def __init__(self, make):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.engine = self.call(make(), 10 * SECONDS)
        self._asked = 0

    def call(self, work, seconds=2 * SECONDS):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)

    def request(self, source, prompt, tokens=TOKENS):
        return Request(self, source, prompt, tokens)

    def end(self):
        async def stop():
            self.engine.shutdown()
            await asyncio.sleep(0)
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self.call(stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(SECONDS)
        self.loop.close()


class Request:
    """A request of a handle: its tokens as they come, and how it ended."""

    def __init__(self, rollouts, handle, prompt, tokens):
        rollouts._asked += 1
        self.prompt = prompt
        self.ids = []
        self.last = None
        self._work = self._run(handle, tokens, f"request-{rollouts._asked}")
        self._future = asyncio.run_coroutine_threadsafe(self._work, rollouts.loop)

    async def _run(self, handle, tokens, name):
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, detokenize=False, ignore_eos=True
        )
        prompt = {"prompt_token_ids": self.prompt}
        async for output in handle.generate(prompt, sampling, name):
            self.last = output.outputs[0]
            self.ids = list(self.last.token_ids)

    def wait_for(self, count):
        deadline = time.monotonic() + SECONDS
        while len(self.ids) < count and not self._future.done():
            assert time.monotonic() < deadline, f"{len(self.ids)} tokens"
            time.sleep(0.002)

    def end(self):
        self._future.result(SECONDS)
        return self

    @property
    def spans(self):
        return [(span.version, span.start, span.end) for span in self.last.weight_versions]


@pytest.fixture(scope="module")
def rollouts(warm, checkpoint, engine_options):
    async def make():
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        args = AsyncEngineArgs(
            model=str(checkpoint(0)),
            weight_transfer_config={"backend": "parallelkit"},
            worker_extension_cls="upset.Upset",
            **engine_options,
        )
        return AsyncLLM.from_engine_args(args)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # starting, vLLM warns of its own parts
        made = Rollouts(make)
    yield made
    made.end()


@pytest.fixture
def source():
    return tiny.Source(tiny.tensors(0))


@pytest.fixture
def publisher(source):
    with pk.publish_weights(source, timeout=SECONDS) as publisher:
        yield publisher


@pytest.fixture(scope="module")
def of_seed(make_engine, tmp_path_factory):
    """Greedy tokens of an engine that never had other weights than those of a seed; made once."""
    engines, known = {}, {}

    def tokens(seed, prompt, count):
        if seed not in engines:
            folder = tiny.save(tmp_path_factory.mktemp(f"seed-{seed}"), seed)
            engines[seed] = make_engine(folder)
        key = (seed, tuple(prompt), count)
        if key not in known:
            known[key] = tiny.greedy(engines[seed], count, [prompt])[0]
        return known[key]

    return tokens


def update(publisher, source, seed):
    """The version gets the number of its seed."""
    source.put(tiny.tensors(seed))
    return publisher.update(seed)


def check(request, of_seed):
    """Every token is of the version that the engine says, from the first to the last."""
    ends = 0
    for version, start, end in request.spans:
        assert start == ends
        context = request.prompt + request.ids[:start]
        assert request.ids[start:end] == of_seed(int(version), context, end - start), version
        ends = end
    assert ends == len(request.ids)


def test_an_update_under_load_loses_and_mixes_nothing(rollouts, publisher, source, of_seed):
    handle = publisher.attach(rollouts.engine, loop=rollouts.loop, name="rollouts")
    update(publisher, source, 1)
    prompts = [*tiny.prompts()[:2], [5, 6, 7], list(range(20, 60))]
    requests = [rollouts.request(handle, prompt) for prompt in prompts]
    pauses = []
    for seed, reached in ((2, 10), (3, 60)):
        for request in requests:
            request.wait_for(reached)
        report = update(publisher, source, seed)
        (engine,) = report.engines
        assert (engine.state, engine.cache, engine.weight_version) == (
            "committed",
            "reset",
            str(seed),
        )
        pauses.append(engine.pause_seconds)
    late = rollouts.request(handle, prompts[0], 16)
    for request in [*requests, late]:
        request.end()
    assert [len(request.ids) for request in requests] == [TOKENS] * 4
    assert [request.last.finish_reason for request in requests] == ["length"] * 4
    assert all({v for v, *_ in request.spans} <= {"1", "2", "3"} for request in requests)
    assert any(len(request.spans) > 1 for request in requests), "no update came in between"
    assert late.spans == [("3", 0, 16)]
    for request in [*requests, late]:
        check(request, of_seed)
    assert handle.version == 3
    assert all(0 < pause < SECONDS for pause in pauses)


@pytest.mark.parametrize("pause", ["wait", "abort"])
def test_other_pauses(rollouts, publisher, source, of_seed, pause):
    handle = publisher.attach(rollouts.engine, loop=rollouts.loop, pause=pause)
    update(publisher, source, 1)
    request = rollouts.request(handle, [5, 6, 7])
    request.wait_for(5)
    update(publisher, source, 2)
    request.end()
    if pause == "wait":
        assert (request.last.finish_reason, len(request.ids)) == ("length", TOKENS)
    else:
        assert request.last.finish_reason == "abort"
        assert 5 <= len(request.ids) < TOKENS
    assert request.ids == of_seed(1, [5, 6, 7], len(request.ids))
    after = rollouts.request(handle, [5, 6, 7], 16).end()
    assert after.ids == of_seed(2, [5, 6, 7], 16)


def test_cache_keep_is_said(rollouts, publisher, source):
    publisher.attach(rollouts.engine, loop=rollouts.loop, cache="keep")
    (engine,) = update(publisher, source, 1).engines
    assert engine.cache == "kept"


def test_a_load_that_fails_ends_what_is_in_flight_and_comes_back(
    rollouts, publisher, source, of_seed
):
    handle = publisher.attach(rollouts.engine, loop=rollouts.loop)
    update(publisher, source, 1)
    request = rollouts.request(handle, [5, 6, 7])
    request.wait_for(5)
    rollouts.call(rollouts.engine.collective_rpc("upset_next_load", args=("raise",)))
    with pytest.raises(PartialCommitError, match="made to fail half way"):
        update(publisher, source, 2)
    try:
        request.end()
        assert request.last.finish_reason == "abort"
    except QuarantinedError:
        pass
    assert request.ids == of_seed(1, [5, 6, 7], len(request.ids)), "no token of torn weights"
    assert (handle.state, handle.version) == ("quarantined", 1)
    with pytest.raises(QuarantinedError, match="made to fail half way"):
        rollouts.request(handle, [5, 6, 7]).end()
    assert not rollouts.call(rollouts.engine.is_paused()), "it was resumed all the same"
    update(publisher, source, 3)
    assert (handle.state, handle.version) == ("serving", 3)
    assert rollouts.request(handle, [5, 6, 7], 16).end().ids == of_seed(3, [5, 6, 7], 16)


def test_update_on_the_engines_own_loop_is_refused(rollouts, publisher, source):
    publisher.attach(rollouts.engine, loop=rollouts.loop)

    async def blocking():
        publisher.update()

    with pytest.raises(UpdateAbortedError, match=r"await asyncio\.to_thread"):
        rollouts.call(blocking())

    async def right():
        return await asyncio.to_thread(publisher.update)

    assert rollouts.call(right()).engines[0].state == "committed"


def test_an_engine_that_sleeps_takes_no_update(rollouts, publisher, source):
    publisher.attach(rollouts.engine, loop=rollouts.loop)
    rollouts.call(rollouts.engine.pause_generation(mode="keep"))
    with pytest.raises(UpdateAbortedError, match="asleep or paused"):
        update(publisher, source, 1)
    rollouts.call(rollouts.engine.resume_generation())
    assert update(publisher, source, 1).version == 1
