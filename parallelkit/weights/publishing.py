"""The open phase at the trainer: `publish_weights`."""

from __future__ import annotations

from typing import Any, Final

from parallelkit import groups, hooks
from parallelkit.errors import (
    GroupError,
    NoBackendError,
    NotInitializedError,
    TransportError,
    WeightTransferError,
)
from parallelkit.protocols import ProcessGroup, ShardedSource, WeightSource
from parallelkit.weights.collective import agree
from parallelkit.weights.coordinator import Settings
from parallelkit.weights.endpoint import check_timeout
from parallelkit.weights.manifest import check_manifest
from parallelkit.weights.options import check_publish_options
from parallelkit.weights.plan import plan_transfer
from parallelkit.weights.publisher import WeightPublisher

VERIFY: Final = ("digest", "readback", "sample", "off")
COMMIT: Final = ("auto", "staged", "in_place")


def publish_weights(
    model: Any,
    *,
    transport: str = "auto",
    commit: str = "auto",
    verify: str = "digest",
    endpoint: str | None = None,
    timeout: float = 60.0,
    aliased: bool = False,
    keep_last: bool = False,
    check_finite: bool = False,
    group: ProcessGroup | None = None,
    **options: Any,
) -> WeightPublisher:
    """Publish a model's weights, to be followed by subscribers in other processes.

    Collective over `group`: every rank calls it with the same arguments, and its part of the same
    model. With replicas (DDP) rank 0 serves, and the others learn each outcome. Of a model that is
    spread over ranks (FSDP2, tensor parallel, pipelines) every rank describes and serves what it
    holds. It blocks until all ranks agree on the manifest, not for subscribers.

    Args:
        model: an `nn.Module` (wrapped or compiled: plain names are published), whatever a plugin
            knows, or a `WeightSource`.
        transport: `"auto"`: each member gets what reaches it at the least cost; or a name from
            `parallelkit doctor`, such as `"shm"`, `"tcp"` or `"cuda_ipc"`, for
            all.
        commit: `"staged"`: bytes are complete and verified before the first live byte is written.
            `"in_place"`: nothing is fetched before the decision; then members read straight into
            live memory and compare digests, which needs no memory besides. What comes changed is
            fetched once more, and then that member is quarantined. `"auto"` is staged, but in place
            where a GPU reads its own memory (`cuda_ipc`).
        verify: `"digest"` hashes every bucket at the source and as received; `"readback"` hashes
            live memory too, after placement; `"sample"` a sixteenth of the buckets; `"off"`.
        endpoint: address of the control channel, `"10.0.0.5:0"` or `"[fd00::2]:0"`: that of the
            interface to listen on; port 0 takes a free one. Default loopback, for members of this
            host; with another address `"auto"` opens `tcp` too. Addresses that mean all interfaces
            are refused.
        timeout: seconds for each half of an update (until the decision, and after it), for joining,
            and for noticing a silent peer.
        aliased: let the model's tensors live in the transport's memory, which saves the copy into
            it. Their storage is replaced once, now; identity, values and ties stay. Do not give
            them new storage later, and do not change them while `update` runs. Not for a model
            that is spread over ranks.
        keep_last: keep the last committed version, in arenas of twice the size, and give it at once
            to members that join or come back, while the trainer does something else. Without it
            they wait for the next update. So does a member that keeps parts which none kept
            before.
        check_finite: let `update` refuse NaN and infinity, before anything is sent; costs one more
            read of the source.
        group: the trainer's ranks; default the current group, or none.
        options: for transports; `named=True` makes `shm` use a named segment, `encrypt=False`
            lets `tcp` send bytes in the clear, with keyed hashes.

    Raises:
        NoBackendError: no plugin knows the model's type.
        ManifestError: the model has nothing to publish, or something that cannot be.
        NotInitializedError: a launcher started several ranks, and no process group is open.
        RankMismatchError: the ranks' models differ.
        UnsupportedFeatureError: a tensor is spread in a way that cannot be published, by name.
        TransportError: no transport, no memory, or the endpoint cannot be used.
        WeightTransferError: an argument is not one of those allowed.

    Example:
        >>> publisher = pk.publish_weights(model)                # doctest: +SKIP
        >>> send_privately(publisher.ticket)                     # doctest: +SKIP
        >>> report = publisher.update()                          # doctest: +SKIP
    """
    group = _current_group() if group is None else group
    if group is not None and not isinstance(group, ProcessGroup):
        raise GroupError(f"group is a {type(group).__qualname__}; it is a process group, or None")
    settings = Settings(
        transport=transport,
        commit=commit,
        verify=verify,
        aliased=aliased,
        keep_last=keep_last,
        check_finite=check_finite,
        timeout=timeout,
        endpoint=endpoint,
        options=options,
    )
    source: WeightSource | None = None
    problem: Exception | None = None
    try:
        _check_choice("verify", verify, VERIFY)
        _check_choice("commit", commit, COMMIT)
        check_timeout(timeout)
        if not isinstance(transport, str):
            raise TransportError(f"transport is {transport!r:.80}; it is 'auto' or a name")
        _check_flag("aliased", aliased)
        _check_flag("keep_last", keep_last)
        _check_flag("check_finite", check_finite)
        if keep_last and aliased:
            raise WeightTransferError(
                "keep_last=True with aliased=True: the model lives in the arena, where the last "
                "version cannot be kept while it trains; choose one of them"
            )
        source = source_of(model)
        check_publish_options(options)
        what = "a model in parts"
        if not isinstance(source, ShardedSource):
            check_manifest(source.manifest(), source)
            what = f"model {plan_transfer(source.manifest()).digest.hex()[:12]}"
        mine = f"{what}, {transport}, commit {commit}, verify {verify}, {timeout:g} s"
        mine += ", keep_last" if keep_last else ""
        mine += ", aliased" if aliased else ""
        mine += "".join(f", {key}={value!r:.80}" for key, value in sorted(options.items()))
        mine += ", check_finite" if check_finite else ""
    except Exception as error:
        problem, mine = error, f"failed: {type(error).__name__}: {str(error)[:500]}"
    if group is not None and group.world_size > 1:
        agree(group, mine, problem)
    if source is None or problem is not None:
        raise problem or WeightTransferError("nothing to publish")
    if isinstance(source, ShardedSource):
        source.join(group)
        check_manifest(source.manifest(), source)
    return WeightPublisher(source, settings, group)


def source_of(model: Any) -> WeightSource:
    """The model itself if it is a source, else the source that a plugin makes of it.

    Raises:
        NoBackendError: no plugin knows its type.
    """
    source = model if isinstance(model, WeightSource) else hooks.weight_source(model)
    if source is None:
        raise NoBackendError(
            f"no installed plugin reads weights from a {type(model).__module__}."
            f"{type(model).__qualname__}; for an nn.Module: pip install parallelkit-torch"
        )
    return source


def _current_group() -> ProcessGroup | None:
    try:
        return groups.current_group()
    except NotInitializedError:
        launch = groups.read_launch()
        if launch.world_size > 1:
            raise NotInitializedError(
                f"{launch.launcher} started {launch.world_size} ranks and no process group is "
                "open: each rank would publish on its own. Call pk.init_process_group() first; it "
                "adopts a group of torch.distributed, as DDP, Accelerate and Fabric make it"
            ) from None
        return None


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise WeightTransferError(f"{name} is {value!r:.80}; allowed are {', '.join(allowed)}")


def _check_flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise WeightTransferError(f"{name} is {value!r:.80}; it is True or False")
