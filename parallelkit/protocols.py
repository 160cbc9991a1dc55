"""The handles that plugins return: plain typed methods, no hook behind any of them.

`Tensor` below is the framework's own tensor type; parallelkit wraps none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from parallelkit.plan import ParallelPlan
    from parallelkit.specs import Accelerator, EngineCommit
    from parallelkit.weights import overlap
    from parallelkit.weights.layout import Region
    from parallelkit.weights.manifest import Manifest
    from parallelkit.weights.regions import Bytes, Span
    from parallelkit.weights.runs import Digests, Numbers

Tensor = Any
Plain = None | bool | int | float | str | bytes | list["Plain"] | dict[str, "Plain"]


@runtime_checkable
class ProcessGroup(Protocol):
    """An open process group. All methods but the properties are collective over its ranks.

    Every rank of the group must make the same calls in the same order. Each call blocks until
    this rank's part is done, or raises `CollectiveTimeoutError` after the group's timeout (the
    ranks that did not arrive are named as far as known), `CollectiveError` when a peer is gone,
    `GroupClosedError` after `close`. Inputs are never changed; results are new tensors on the
    same device.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def framework(self) -> str: ...
    @property
    def timeout(self) -> float:
        """Seconds that a collective may take."""

    @property
    def closed(self) -> bool: ...
    @property
    def native(self) -> Any:
        """The framework's own group object, for calls that parallelkit does not wrap."""

    def barrier(self, *, timeout: float | None = None) -> None:
        """Wait until every rank is here."""

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Combine `x` elementwise over ranks; `op` is sum, mean, max, min or product."""

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        """Give every rank the `x` of rank `src`; shapes and dtypes must agree."""

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Give every rank the list of all ranks' `x`, by rank; shapes must agree."""

    def reduce_scatter(self, x: Tensor, op: str = "sum") -> Tensor:
        """Combine `x` over ranks and keep this rank's slice of dim 0, which must divide evenly."""

    def broadcast_object(self, obj: Plain, src: int = 0, *, timeout: float | None = None) -> Plain:
        """Give every rank the plain object of rank `src`; msgpack, never pickle.

        `timeout` in seconds replaces the group's for this call.

        Raises:
            NotPlainError: `obj` holds something other than None, bool, int, float, str, bytes,
                list and dict with string keys. Raised on `src` before anything is sent; the
                others raise `CollectiveError` with the reason.
        """

    def subgroup(self, ranks: Sequence[int]) -> ProcessGroup | None:
        """Make a group of some ranks. Collective over *this* group, members or not.

        Returns:
            The new group on its members (ranks numbered by position in `ranks`), else None.
        """

    def close(self) -> None:
        """Leave the group; harmless when repeated. A group the user made stays alive."""

    def __enter__(self) -> ProcessGroup: ...
    def __exit__(self, *exc: object) -> None: ...


@runtime_checkable
class ParallelContext(Protocol):
    """How one model is spread over a group's ranks."""

    @property
    def plan(self) -> ParallelPlan: ...
    @property
    def group(self) -> ProcessGroup: ...
    @property
    def mode(self) -> str: ...
    @property
    def effective(self) -> str:
        """The mode that runs; differs from `mode` only with `fallback=True`."""

    @property
    def reduce(self) -> str: ...
    @property
    def native(self) -> Any: ...

    def parallelize(self, model: Any) -> Any:
        """Spread `model`; collective, the same model on every rank."""

    def train_step(
        self,
        model: Any,
        inputs: Any,
        target: Any = None,
        *,
        loss: Callable[[Any, Any], Tensor],
        microbatches: int | None = None,
        weight: float | None = None,
        sync: bool = True,
        backward: bool = True,
    ) -> Tensor:
        """Run one batch forward and backward, alike under every plan. Collective over all ranks.

        `loss(output, target)` gives the mean over items, or with `weight` the sum over items or
        tokens, of which there are `weight` in this data part. `microbatches` cuts the batch;
        `sync=False` puts the reduction of gradients off to a later call; `backward=False` only
        evaluates. The optimiser's step is the caller's, such as by `apply_gradients`.

        Returns:
            This data part's loss: its mean, or with `weight` its share of the global weighted
            mean. Detached, the same on every rank of the data part.
        """

    def accumulate(self, model: Any, *, sync: bool) -> AbstractContextManager[None]:
        """Within, backward passes reduce gradients over the data axes only if `sync`."""

    def apply_gradients(self, model: Any, optimizer: Any) -> None:
        """Let the optimiser use the gradients of the train steps since the last call.

        They are forgotten afterwards. Every rank calls it; ranks end with the same values.

        Raises:
            GradientError: there are none.
        """

    def clip_grad_norm_(self, model: Any, max_norm: float, *, norm_type: float = 2.0) -> Tensor:
        """Scale gradients to a norm, over all shards and stages; returns it. Collective."""

    def weighted_mean(self, total: Tensor, weight: float) -> Tensor:
        """Turn this data part's summed loss into one whose gradients weigh all parts' tokens.

        Collective over the data axes.
        """

    def shard(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        mode: str = "pad",
        shuffle: bool | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Any:
        """Make a loader over this rank's part of `dataset`, by data coordinate. Not collective."""

    def seed(self, base: int) -> int:
        """Seed random generators: data parts differently, ranks of one part alike."""

    def save(
        self,
        path: str,
        model: Any,
        optimizer: Any = None,
        *,
        extra: Mapping[str, Plain] | None = None,
        overwrite: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Write a checkpoint that any other plan can load, with plain values. Collective."""

    def load(
        self, path: str, model: Any, optimizer: Any = None, *, timeout: float | None = None
    ) -> dict[str, Plain]:
        """Read a checkpoint in place, whatever plan wrote it; returns its values. Collective."""

    def reset(self) -> None:
        """Undo what the context changed globally; harmless when repeated."""

    def explain(self) -> str: ...


@runtime_checkable
class ExecutionMode(Protocol):
    """Eager or graph, as asked and as it is. A context manager that restores what was."""

    @property
    def requested(self) -> str: ...
    @property
    def effective(self) -> str: ...
    @property
    def reason(self) -> str: ...

    @property
    def graphs(self) -> int:
        """Graphs compiled so far for what `compile` was given."""

    @property
    def recompiles(self) -> int:
        """How often something that was compiled already was compiled again; constant over steps
        whose shapes and types are constant."""

    @property
    def graph_breaks(self) -> int:
        """Places in the code where a graph had to end early."""

    def compile(self, target: Callable[..., Any] | Any) -> Any:
        """Return `target`, a function or a model, ready to run in this mode."""

    def explain(self) -> str:
        """Say what was done to each target, in order, and what became of it."""

    def __enter__(self) -> ExecutionMode: ...
    def __exit__(self, *exc: object) -> None: ...


@runtime_checkable
class WeightSource(Protocol):
    """Weights that can be read. Called by the thread that calls `publisher.update()` only."""

    @property
    def device(self) -> str: ...

    def manifest(self) -> Manifest:
        """Names, dtypes, shapes and aliases, in a fixed order; no data is read."""

    def begin(self) -> None:
        """An update begins: look at the model again.

        Raises:
            ManifestError: the model has other names, dtypes, shapes or ties than its manifest.
        """

    def host_bytes(self, index: int) -> memoryview:
        """Return tensor `index` (of the manifest's unique tensors) as contiguous row-major bytes.

        A view of the live tensor where it is contiguous in host memory, else a copy; valid
        until the next call.
        """

    def adopt(self, buffers: Sequence[memoryview]) -> None:
        """Move every unique tensor into the writable host buffer of the same index.

        From then on the model's own tensors live in these buffers and `host_bytes` returns them.

        Raises:
            UnsupportedFeatureError: tensors of this source cannot live in foreign memory.
        """


@runtime_checkable
class ShardedSource(WeightSource, Protocol):
    """Weights of which every rank of the publisher holds a part.

    Each rank has a source of its own. An update calls `look` on all; then each rank that hands
    parts out calls `begin` and reads them by `host_bytes`, which gives *this rank's part* of a
    unique tensor, row-major: the box that `parallelkit.weights.layout.region` says. Where the
    layout is None, rank 0 hands the whole out. A rank is asked only for what it hands out
    (`parallelkit.weights.layout.serves`).
    """

    def join(self, group: ProcessGroup | None) -> None:
        """Make one manifest of what all ranks hold; before any other call. Collective.

        No tensor is moved. Afterwards `manifest` is the whole model's, with layouts, on every
        rank. What is wrong on one rank is raised on all.

        Raises:
            RankMismatchError: the ranks hold different models.
            UnsupportedFeatureError: a layout that no manifest can say, by name.
        """

    def look(self) -> None:
        """An update begins: look at the model again. Collective, and blocks for every rank.

        Raises:
            ManifestError: on some rank the model is not what the manifest says; on all ranks.
        """


@runtime_checkable
class WeightSink(Protocol):
    """A target that weights are placed into. Called by the thread that calls `step()` or `use()`.

    Methods that write are called between `begin` and `finish` only.
    """

    @property
    def device(self) -> str: ...

    @property
    def module(self) -> Any:
        """What `with subscriber.use() as module` gives the user.

        Raises:
            WrongThreadError: the framework belongs to another thread.
        """

    def needs(self) -> Manifest:
        """Exactly what the target needs, with its own names and aliases."""

    def check(self) -> None:
        """Look at the target again; may be called in another thread than the user's.

        Raises:
            ManifestError: the target has other names, dtypes, shapes or ties than `needs` said.
        """

    def begin(self) -> None:
        """Live memory is about to be written.

        Raises:
            WrongThreadError: it may not be, in this thread; nothing was written.
        """

    def destination(self, index: int) -> memoryview | None:
        """Return the live bytes of tensor `index`, writable and contiguous, or None."""

    def write(self, index: int, data: memoryview) -> None:
        """Place the row-major bytes of tensor `index`, where `destination` gave None.

        `data` may be memory of the publisher, or of others: do not write into it. It stays, with
        these bytes, until `finish` returns or the next `begin`; keep no view of it beyond.
        """

    def host_bytes(self, index: int) -> memoryview:
        """Read back tensor `index` as placed, row-major; valid until the next call."""

    def finish(self) -> None:
        """All tensors are placed: refresh whatever the target derives from them."""


@runtime_checkable
class LoaderSink(WeightSink, Protocol):
    """A target that takes tensors under the publisher's names, by a loader of its own."""

    def learn(self, published: Manifest) -> None:
        """Find out what becomes of these tensors; once, before any other call. Writes nothing.

        Afterwards `needs` is what was published, and indexes count its unique tensors.

        Raises:
            ManifestMismatchError: they are not what the target needs; every difference is listed.
        """

    def readable(self, index: int) -> bool:
        """Whether `host_bytes` can give tensor `index` back; else its bytes as received count."""

    def explain(self) -> str:
        """Say which tensors take which way, and why."""


@runtime_checkable
class FiniteSink(WeightSink, Protocol):
    """A target that has to know whether what is placed holds NaN or infinity.

    Bytes that are here before they are placed are looked at there: while they are received, not
    while the target stands still.
    """

    def note_finite(self, finite: bool) -> None:
        """Say whether all values of this update are finite; between `begin` and `finish`.

        Not called where the bytes go straight to the target: then `finish` has to look itself.
        """


@runtime_checkable
class RegionSink(WeightSink, Protocol):
    """A target that keeps a part of the tensors: its shards, its pipeline stage.

    `needs` still describes whole tensors, by their global shapes, so that the manifest can be
    compared; it may lack tensors that are published. `destination`, `write` and `host_bytes` are
    of the kept region, row-major.
    """

    def regions(self) -> Sequence[Region | None]:
        """What is kept of each unique tensor of `needs`, in global coordinates; None: nothing.

        Asked once, when the target joins. What is kept of a tensor stays the same.
        """


@runtime_checkable
class LocatedSink(WeightSink, Protocol):
    """A target that can tell which live memory it writes, also what it writes itself.

    By that another subscriber's writes to a part of it are noticed. Of other sinks only what
    `destination` gave is known.
    """

    def live_memory(self) -> Sequence[overlap.Span]:
        """Where everything lies that an update writes; spans may overlap one another.

        Asked after `begin`, and again after `finish` or an error, in the same thread. Does not
        raise. While nothing moved the answer is the same object, so that no one has to look
        through it again. `space` is the device as a string; of the host's memory `"cpu"`.
        """


@runtime_checkable
class DeviceSource(WeightSource, Protocol):
    """A source whose tensors other processes may read where they lie, on a device."""

    def accelerator(self) -> Accelerator | None:
        """The device that the weights are on, and what keeps others from reading it; None: none."""

    def live(self) -> Sequence[Tensor | None]:
        """This rank's part of each unique tensor, as the framework has it; None: it has none.

        As the last `begin` or `look` found them.
        """


@runtime_checkable
class DeviceCopier(Protocol):
    """Pairs of memory on a device, made once: what is copied where, and in which bucket it is.

    Every call but `wait` only asks the device for something, and they follow one another there. A
    digest is of a bucket: of its pairs' bytes, in order, each pair from a new word of 8 bytes on.
    May be used in any thread, by one at a time.
    """

    def copy(self, *, digest: bool) -> None:
        """Copy each pair; with `digest`, also digest what is read."""

    def copy_and_read_back(self, *, linked: bool) -> None:
        """Copy with digests, and digest the targets.

        Args:
            linked: the sources are another device's, so that one can go on beside the other.
        """

    def digest_source(self) -> None:
        """Digest what is at the sources."""

    def digest_target(self) -> None:
        """Digest what is at the targets."""

    def wait(self) -> DeviceDigests:
        """Wait for the device, and give the digests that were taken since the last call.

        Raises:
            TransportError: the device failed.
        """


class DeviceDigests(Protocol):
    """Digests by bucket, uint64; None where none were asked for."""

    @property
    def copied(self) -> Digests | None: ...
    @property
    def source(self) -> Digests | None: ...
    @property
    def target(self) -> Digests | None: ...


class DeviceMemory(Protocol):
    """Memory on a device, for as long as this object is kept."""

    @property
    def address(self) -> int:
        """Of the first byte; a multiple of 256."""


@runtime_checkable
class DeviceSink(WeightSink, Protocol):
    """A target on a device that reads the publisher's memory itself.

    Methods that write, and addresses to be written to, hold between `begin` and `finish` only.
    """

    def accelerator(self) -> Accelerator | None:
        """The device that the target is on; None: none that could read others' memory."""

    def addresses(self) -> Sequence[int]:
        """Where each unique tensor's row-major bytes lie, as last looked at; 0: not in one run."""

    def place(self, index: int, address: int) -> None:
        """Copy row-major bytes from device memory into tensor `index`, whose address is 0."""

    def gather(self, index: int, address: int) -> None:
        """The reverse of `place`: copy tensor `index` into device memory, row-major."""

    def allocate(self, nbytes: int) -> DeviceMemory:
        """Allocate memory on the target's device; may be called in any thread.

        Raises:
            TransportError: there is not enough.
        """

    def copier(
        self, source: Numbers, target: Numbers | None, nbytes: Numbers, bucket: Numbers | None
    ) -> DeviceCopier:
        """Prepare to copy pairs; may be called in any thread.

        Args:
            source, target: addresses that the target's device reads and writes; target None:
                nothing is copied, and what is at the sources is digested.
            nbytes: of each pair.
            bucket: which digest each pair is part of, from 0; None: no digests.

        Raises:
            TransportError: the pairs overlap, or are no memory.
        """


@runtime_checkable
class DevicePublisher(Protocol):
    """One publisher rank's end of a transport that reads weights where they lie.

    Nothing is staged: members read the live tensors while `update` runs.
    """

    @property
    def name(self) -> str: ...
    @property
    def epoch(self) -> int: ...

    def refresh(self) -> bool:
        """An update begins: look where the weights lie now. Whether that is elsewhere than before.

        Returns once all that was asked of the device before is done.

        Raises:
            TransportError: they cannot be read from outside any more.
        """

    def offer(self) -> bytes:
        """How to reach this rank's parts, where they lie now; over the control channel only."""

    def reader(
        self, tensor: Numbers, offset: Numbers, nbytes: Numbers, bucket: Numbers
    ) -> DeviceCopier:
        """Prepare to digest runs of bytes of this rank's parts; until they move.

        Args:
            tensor: index of the unique tensor; offset: first byte in this rank's part of it.
            nbytes, bucket: as of `DeviceSink.copier`.
        """

    def non_finite(self) -> Mapping[int, int]:
        """How many values of this rank's parts are NaN or infinite, by unique tensor with any."""

    def bump(self) -> int:
        """Advance the epoch: whatever was read before is void. Returns the new epoch."""

    def close(self) -> None: ...


@runtime_checkable
class DeviceSubscriber(Protocol):
    """A member's end of such a transport, to one publisher rank."""

    @property
    def name(self) -> str: ...

    @property
    def linked(self) -> bool:
        """Whether the rank's memory is another device's than the target's."""

    def follow(self, offer: bytes) -> None:
        """The rank's parts lie elsewhere now. Nothing may be reading the former ones."""

    def parts(self) -> tuple[Numbers, Numbers]:
        """Address of the rank's part of each unique tensor, for the target's device; and bytes."""

    def epoch(self, *, deadline: float) -> int:
        """The publisher's epoch now; as of `SubscriberTransport`."""

    def close(self) -> None: ...


@runtime_checkable
class PublisherTransport(Protocol):
    """One publisher rank's end of a transport: an arena of what it hands out, and its epoch.

    The arena is memory of the host: `buffer` is laid out by `parallelkit.weights.plan.export`.
    The epoch is a counter that a late reader checks before and after it reads.
    """

    @property
    def name(self) -> str: ...
    @property
    def buffer(self) -> memoryview:
        """The writable arena, of the `nbytes` that the spec said."""

    @property
    def epoch(self) -> int: ...

    def offer(self) -> bytes:
        """How to reach this rank's arena; no secret is in it. Sent over the control channel."""

    def bump(self) -> int:
        """Advance the epoch: whatever was read before is void. Returns the new epoch."""

    def close(self) -> None: ...


@runtime_checkable
class NetworkTransport(PublisherTransport, Protocol):
    """A transport whose bytes leave the process by a network, as reports say."""

    @property
    def encrypted(self) -> bool:
        """Whether nobody between the two ends can read them."""


@runtime_checkable
class SubscriberTransport(Protocol):
    """A member's end of a transport, to one publisher rank."""

    @property
    def name(self) -> str: ...

    @property
    def memory(self) -> memoryview | None:
        """The publisher rank's arena as readable memory, or None where it has to be pulled."""

    def pull(
        self, spans: Sequence[Span], into: Sequence[Bytes], *, epoch: int, deadline: float
    ) -> None:
        """Fill each contiguous `into` with the packed bytes of a span of the arena.

        Args:
            spans: what to read; `into`: as many writable uint8 arrays of the spans' sizes.
            epoch: the publisher's, checked before the first byte and after the last.
            deadline: monotonic seconds.

        Raises:
            EpochError: the publisher's epoch is another.
            TransportError: it refused.
            ProtocolError: a span reaches outside the arena.
            PeerLostError: the publisher's rank is gone.
            UpdateTimeoutError: the deadline passed.
        """

    def epoch(self, *, deadline: float) -> int:
        """The publisher's epoch now; it may take a round trip.

        Raises:
            PeerLostError, UpdateTimeoutError: the publisher's rank is gone, or silent.
        """

    def close(self) -> None: ...


@runtime_checkable
class EngineClient(Protocol):
    """Controls one inference engine for a publisher that it is attached to.

    Weights never pass through it. The engine's workers are members of a ticket and stage each
    version over the control channel, in memory of their own; the client delivers the ticket, and
    opens the slot in which they put a staged version in place.

    Each call comes from one thread at a time, not always the same, and ends within about
    `timeout` seconds, by an error if need be: nobody else watches a call that hangs. A
    `PeerLostError` says that the engine is gone for good, `UpdateTimeoutError` that it did not
    answer; any other error is told to the user as it is, so its text says what to do.
    """

    @property
    def name(self) -> str:
        """For reports, printable, 200 characters at most: `vllm-0 (http://127.0.0.1:8000)`."""

    @property
    def members(self) -> int:
        """How many worker ranks join: tensor x pipeline x data."""

    @property
    def handle(self) -> Any:
        """What `attach` gives to the user; it refuses to generate while quarantined."""

    def init(self, ticket: str, *, timeout: float) -> None:
        """Deliver the ticket, privately: each worker joins with it as the member of its rank."""

    def begin(self, version: int, *, timeout: float) -> None:
        """An update is about to begin; nothing was sent for it yet.

        Where it returns, one call of `commit`, `abort` or `quarantine` follows.

        Raises:
            StateError: the engine cannot take part: asleep, an update is open in it.
            PeerLostError: it is dead.
        """

    def commit(self, version: int, *, timeout: float) -> EngineCommit:
        """Every worker has staged `version`, and it is decided: put it in place.

        Pauses generation, lets every worker put its bytes in place, brings the caches in line,
        sets the version that the engine reports, resumes. It resumes on every path, also where it
        raises. When it returns, the engine is at `version` and an earlier quarantine is over.
        When it raises, the publisher calls `quarantine`.
        """

    def abort(self, version: int, reason: str, *, timeout: float) -> None:
        """The update that `begin` announced was called off; the engine goes on as it was."""

    def quarantine(self, reason: str) -> None:
        """Weights may be torn: refuse to generate until a later commit works; never blocks long.

        What is being generated ends now, as far as the engine can be reached. A `commit` that is
        still under way does not lift it.
        """

    def version(self, *, timeout: float) -> int:
        """The version that the engine says it serves, 0 before the first."""

    def close(self) -> None:
        """The publisher closed, or let the engine go, which goes on serving. Never blocks long;
        harmless when repeated."""


@runtime_checkable
class ThreadBoundClient(EngineClient, Protocol):
    """A client of an engine that one thread of this process serves, such as by its event loop."""

    def check_thread(self) -> None:
        """See that the calling thread is another one; called by `attach` and `update` as such.

        Raises:
            StateError: it is that thread, which could not serve the engine while it waits.
        """
