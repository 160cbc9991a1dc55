"""The weight-transfer engine `parallelkit`, as vLLM makes one in each worker.

vLLM's start is a check, its update puts a staged version in place and may raise, its finish does
nothing that can fail. Bytes travel before: a thread of each worker stages every version. In an
engine of several workers, an error of any of them is a `WorkerError` of the last one; then call
finish_weight_update before the next start, since the others have the update open still.

Use with `publisher.attach(engine)`, or by hand:

    llm = LLM(..., weight_transfer_config={"backend": "parallelkit"})
    llm.init_weight_transfer_engine({"init_info": {"ticket": ticket}})
    ...                                                  # publisher.update(), anywhere
    llm.start_weight_update()
    llm.update_weights({"update_info": {}})
    llm.finish_weight_update()
    llm.reset_prefix_cache()
"""

from __future__ import annotations

import math
import time
from typing import Any, Final, TypeVar

import attrs
import torch

from parallelkit.errors import PeerLostError, QuarantinedError, StateError, UpdateTimeoutError
from parallelkit.weights.joining import subscribe_weights
from parallelkit.weights.subscriber import WeightSubscriber
from parallelkit_vllm.answering import answer
from parallelkit_vllm.errors import EngineRequestError, EngineVersionError
from parallelkit_vllm.register import BACKEND
from parallelkit_vllm.reload import asleep, opened
from parallelkit_vllm.sink import EngineSink
from parallelkit_vllm.versions import RANGE, need, worker_rank

#: Seconds for joining, or for a version to be staged, where a request says nothing.
TIMEOUT: Final = 60.0
_POLL_SECONDS: Final = 0.005
#: How much longer than one worker another may take, beyond what a request lets it: to load.
_GRACE_SECONDS: Final = 300.0
#: The same for a check.
_CHECK_SECONDS: Final = 60.0


def _seconds(instance: object, attribute: attrs.Attribute[float], value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:  # type: ignore[operator]
        raise EngineRequestError(f"timeout is {value!r:.80}; it is a number of seconds above 0")


@attrs.frozen
class InitInfo:
    """What `init_weight_transfer_engine` is given as `init_info`.

    Attributes:
        ticket: from `publisher.new_ticket(members=n)`, with n the workers of this engine.
        timeout: seconds for joining.
    """

    ticket: str = attrs.field()
    timeout: float = attrs.field(default=TIMEOUT, validator=_seconds)

    @ticket.validator
    def _is_text(self, attribute: object, value: object) -> None:
        if not isinstance(value, str) or not value:
            raise EngineRequestError(
                f"ticket is a {type(value).__name__}, not text; it comes from "
                "publisher.new_ticket(members=n), with n the workers of this engine"
            )


@attrs.frozen
class UpdateInfo:
    """What `update_weights` is given as `update_info`.

    Attributes:
        version: what to put in place; None: the newest that was staged, or else the next.
        timeout: seconds to wait for it to be staged.
    """

    version: int | None = attrs.field(default=None)
    timeout: float = attrs.field(default=TIMEOUT, validator=_seconds)

    @version.validator
    def _counts(self, attribute: object, value: object) -> None:
        if value is not None and (type(value) is not int or value < 1):
            raise EngineRequestError(
                f"version is {value!r:.80}; it is a number from 1, or left out for the newest"
            )


Info = TypeVar("Info", InitInfo, UpdateInfo)


class Transfer:
    """What makes vLLM's abstract engine ours; one for each worker.

    Made by vLLM as `(config, vllm_config, device, model)`, the same from 0.25 to 0.33.
    """

    supports_draft_weight_update = False

    # set by vLLM's constructor
    vllm_config: Any
    device: torch.device
    model: torch.nn.Module

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        lacking = [n for n in ("vllm_config", "device", "model") if not hasattr(self, n)]
        if lacking:
            raise EngineVersionError(
                f"this vLLM makes weight-transfer engines without {', '.join(lacking)}; "
                f"parallelkit works with vLLM {RANGE}"
            )
        self._subscriber: WeightSubscriber | None = None
        self._sink: EngineSink | None = None

    @staticmethod
    def trainer_send_weights(*args: Any, **kwargs: Any) -> None:
        """Not the way here; abstract in vLLM's class until 0.27."""
        raise EngineRequestError(
            "parallelkit's trainer side is pk.publish_weights(model) and publisher.update()"
        )

    def parse_init_info(self, init_dict: Any) -> InitInfo | None:
        """Check `init_info`; None on all but the last of several workers if it is refused.

        Raises:
            EngineRequestError: it has other fields; from several workers a `WorkerError`.
        """
        return answer(
            self, lambda: _parsed(InitInfo, init_dict, "init_info"), seconds=_CHECK_SECONDS
        )

    def parse_update_info(self, update_dict: Any) -> UpdateInfo:
        """Check `update_info`; raises `EngineRequestError`."""
        return _parsed(UpdateInfo, update_dict, "update_info")

    def init_transfer_engine(self, init_info: InitInfo | None) -> None:
        """Join the publisher, compare what it has with what is needed here, and follow.

        From then on a thread stages every version that is published. Each worker joins as the
        member of its own rank. Blocks until the publisher has admitted this worker.

        Raises:
            StateError: this worker follows a publisher already, which is there.
            ManifestMismatchError: other weights are published than this engine has.
            TicketError, PeerLostError, UpdateTimeoutError, TransportError: see
                `pk.subscribe_weights`.
            WorkerError: any of these, from several workers.
        """
        if init_info is not None:  # else it was refused, and the last worker says so
            seconds = init_info.timeout + _GRACE_SECONDS
            answer(self, lambda: self._join(init_info), seconds=seconds)

    def _join(self, init_info: InitInfo) -> None:
        now = self._subscriber
        if now is not None and now.connected:
            raise StateError(
                f"this worker follows a publisher already, as {now.name} at version "
                f"{now.version}; close that publisher, or call shutdown_weight_transfer_engine, "
                "before another one attaches"
            )
        self.shutdown()
        sink = EngineSink(self.model, self.vllm_config)
        subscriber = subscribe_weights(
            sink, init_info.ticket, member=self.member, timeout=init_info.timeout
        )
        try:
            subscriber.serve()
        except BaseException:
            subscriber.close()
            raise
        self._sink, self._subscriber = sink, subscriber

    @property
    def member(self) -> int:
        """This worker's rank in the engine, over its data-parallel replicas too."""
        return worker_rank(self.vllm_config)

    @property
    def version(self) -> int:
        """Version of the live weights by the publisher's count; 0 for the checkpoint's."""
        return 0 if self._subscriber is None else self._subscriber.version

    def start_weight_update(self) -> None:
        """Check that an update is possible; nothing is touched.

        Raises:
            StateError: no publisher is followed, weights are asleep, or an update is open.
            WorkerError: any of these, from several workers.
        """
        answer(self, self._check_ready, seconds=_CHECK_SECONDS)

    def _check_ready(self) -> None:
        self._followed("start_weight_update")
        if asleep():
            raise StateError(
                "the engine's weights are asleep, and their memory with them: wake them "
                '(wake_up(tags=["weights"])) before an update'
            )
        if opened(self.model):
            raise StateError(
                "the layers of this model are open for another update, such as by reload_weights; "
                "they cannot be updated nor used: start the engine anew"
            )

    def update_weights(self, update_info: Any) -> None:
        """Put a staged version in place. The engine must not generate meanwhile.

        It is the one that was asked for, or none. One that is in place already is no error.

        Raises:
            EngineRequestError: the request has other fields.
            UpdateTimeoutError: that version was not staged in time; nothing was touched.
            PeerLostError: it was not staged, and the publisher is gone; nothing was touched.
            StateError: a newer version is here; nothing was touched.
            QuarantinedError: the loader failed; the layers are of no version until another update.
            WorkerError: any of these, from several workers.
        """
        answer(self, lambda: self._update(update_info), seconds=_patience(update_info))

    def _update(self, update_info: Any) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # raises in a process without an accelerator
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Do what `update_weights` says, given a checked request."""
        subscriber = self._followed("update_weights")
        asked = update_info.version
        if asked is not None and asked == subscriber.version and subscriber.state == "current":
            return
        if asked is not None:
            _await_staged(subscriber, asked, update_info.timeout)
        subscriber.step(update_info.timeout)
        if subscriber.state == "quarantined":
            raise QuarantinedError(
                f"{subscriber.name} is quarantined: an update was prepared here, and its outcome "
                "is not known; the next update that commits brings it back"
            )

    def finish_weight_update(self) -> None:
        """Nothing is left to do, and so nothing can fail: an error here would wedge the worker."""

    def shutdown(self) -> None:
        """Stop following; the engine keeps its weights. Harmless when repeated."""
        subscriber, self._subscriber, self._sink = self._subscriber, None, None
        if subscriber is not None:
            subscriber.close()

    def _followed(self, what: str) -> WeightSubscriber:
        if self._subscriber is None:
            raise StateError(
                f"{what} before a publisher is followed: publisher.attach(engine), or "
                'init_weight_transfer_engine({"init_info": {"ticket": ticket}})'
            )
        return self._subscriber


def _patience(update_info: Any) -> float:
    """How long one worker waits for the others: each may wait twice, and then loads."""
    try:
        timeout = _parsed(UpdateInfo, update_info, "update_info").timeout
    except EngineRequestError:  # by all of them alike; said where the request is checked
        timeout = TIMEOUT
    return 2 * timeout + _GRACE_SECONDS


def _await_staged(subscriber: WeightSubscriber, asked: int, timeout: float) -> None:
    """Wait until this version is the newest here; put nothing in place."""
    deadline = time.monotonic() + timeout
    while (here := max(subscriber.staged, subscriber.version)) < asked:
        have = f"version {asked} was asked for, and version {here} is the newest here"
        if not subscriber.connected:
            raise PeerLostError(
                f"{have}; the publisher is gone. Version {subscriber.version} stays in place",
                peers=["publisher"],
            )
        if time.monotonic() > deadline:
            raise UpdateTimeoutError(
                f"{have} after {timeout:g} s; version {subscriber.version} stays in place",
                missing=[subscriber.name],
            )
        time.sleep(_POLL_SECONDS)
    if here > asked:
        raise StateError(
            f"version {asked} was asked for, and version {here} is here already: versions do not "
            "go back. Leave the version out for the newest"
        )


def engine_class(base: type) -> type:
    """Make the class that vLLM instantiates, on vLLM's abstract engine.

    Raises:
        EngineVersionError: `base` wants methods that are not known here.
    """
    made = type(
        "ParallelKitEngine",
        (Transfer, base),
        {
            "__doc__": Transfer.__doc__,
            "__module__": __name__,
            "init_info_cls": InitInfo,
            "update_info_cls": UpdateInfo,
        },
    )
    if lacking := sorted(getattr(made, "__abstractmethods__", ())):
        raise EngineVersionError(
            f"this vLLM's weight-transfer engines must have {', '.join(lacking)}, not known "
            f"to parallelkit; it works with vLLM {RANGE}"
        )
    return made


def _parsed(kind: type[Info], given: Any, what: str) -> Info:
    if not isinstance(given, dict):
        raise EngineRequestError(f"{what} is a {type(given).__name__}; it is a table of fields")
    names = [field.name for field in attrs.fields(kind)]
    if odd := sorted(str(key) for key in given if key not in names):
        raise EngineRequestError(
            f"{what} of the engine {BACKEND!r} has {', '.join(map(repr, odd))[:200]}; its fields "
            f"are {', '.join(names)}"
        )
    if kind is InitInfo and "ticket" not in given:
        raise EngineRequestError(
            f"{what} of the engine {BACKEND!r} lacks 'ticket', from publisher.new_ticket()"
        )
    return kind(**given)


def __getattr__(name: str) -> Any:
    if name != "ParallelKitEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.distributed.weight_transfer import base

    made = engine_class(need(base, "WeightTransferEngine", f"the engine {BACKEND!r}"))
    globals()[name] = made
    return made
