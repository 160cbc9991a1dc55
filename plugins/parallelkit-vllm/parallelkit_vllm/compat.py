"""Worker extensions with the interface that scripts for vLLM's RLHF example have.

Only the import of such a script changes:

    from parallelkit_vllm import stateless_init_process_group
    llm = LLM(..., worker_extension_cls="parallelkit_vllm.compat.WorkerExtension")

Nothing here is loaded unless a script asks for it by this import. The interface knows no secret:
who reaches the port of the group while it is made can take part in it. Use `publisher.attach`
where others share the network or the host.

Loaders cannot write into a live CPU engine, whose layers are packed, and the interface has no call
that ends an update. So tensors are collected until there is all that the engine's checkpoint has,
and are put in place together.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from parallelkit.errors import (
    CollectiveTimeoutError,
    ManifestError,
    ParallelKitError,
    RendezvousTimeoutError,
    StateError,
    UnsupportedFeatureError,
)
from parallelkit_vllm import sharing
from parallelkit_vllm.answering import answer
from parallelkit_vllm.receiving import Receiver, prepare
from parallelkit_vllm.sharing import SharedWeights, share_weights
from parallelkit_vllm.sink import DTYPES
from parallelkit_vllm.stateless import StatelessGroup, stateless_init_process_group
from parallelkit_vllm.versions import check_version, worker_rank

__all__ = [
    "ColocateWorkerExtension",
    "SharedWeights",
    "StatelessGroup",
    "WorkerExtension",
    "share_weights",
    "stateless_init_process_group",
]

_TOGETHER: Final = (
    "trainer and workers make this call at the same time: with an LLM, whose collective_rpc waits "
    "for the workers, start it in a thread, make the trainer's own call, and then wait for it"
)


class WorkerExtension:
    """Weights that a trainer broadcasts, tensor by tensor, to each worker of an engine.

    For `worker_extension_cls="parallelkit_vllm.compat.WorkerExtension"`; the methods are called by
    `collective_rpc`. The engine must not have requests under way when the last tensor comes, and
    its prefix cache has to be reset afterwards (`llm.reset_prefix_cache()`).

    In an engine of several workers, an error of any of them is a `WorkerError` of the last one.
    """

    model_update_group: StatelessGroup | None

    def init_weight_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int
    ) -> None:
        """Join the trainer's group, as rank `rank_offset` + the worker's rank. Blocks.

        A group from before is left, and an update that is incomplete is given up.

        Args:
            master_address, master_port: where the trainer, which is rank 0, listens.
            rank_offset: how many ranks the trainer has, mostly 1.
            world_size: all ranks together.

        Raises:
            UnsupportedFeatureError: the worker computes on another device than the CPU.
            EngineCheckpointError: what the engine needs cannot be found out.
            See `stateless_init_process_group`.
        """
        answer(self, lambda: _join(self, master_address, master_port, rank_offset, world_size))

    def update_weight(self, name: str, dtype: Any, shape: Any) -> None:
        """Receive one tensor, which the trainer broadcasts from rank 0 at the same time.

        It is kept aside until everything that the engine's checkpoint has is there; then all is put
        in place, in the last call. Until then the engine generates with the weights it had. The
        same name again, before that, replaces what came.

        Args:
            name: as in the checkpoint, or fused as in the engine.
            dtype: torch's, or its name, such as `"bfloat16"`; a float is cast to the checkpoint's.
            shape: dims, as in the checkpoint.

        Raises:
            StateError: there is no group.
            ManifestMismatchError: the engine has no such tensor. The trainer's broadcast fails with
                that, too, nothing was sent, and the group goes on.
            ManifestError, NonFiniteError: the arguments, or values, are none that can be.
            CollectiveError: the trainer is gone, does something else, or did not come in time.
            ReloadError: the engine's loader failed: its weights are of no version until another
                update is complete.
        """
        answer(self, lambda: _update(self, name, dtype, shape))

    def check_weights_changed(self) -> bool:
        """Whether an update took effect.

        True: the weights that this worker computes with are others than at its start (before the
        first call of any of these methods), and nothing is half sent. Weights that a script set to
        zero are others, unless they were zero before.

        False: nothing changed; or an update is incomplete, of which the log says what is missing;
        or a loader failed.

        Packed layers are seen by what they compute: a change that is less than the rounding of all
        of 64 random outputs is not noticed.
        """
        return bool(answer(self, lambda: _receiver(self).changed()))


class ColocateWorkerExtension:
    """Weights in shared memory, which a trainer on the same host names by handles.

    For `worker_extension_cls="parallelkit_vllm.compat.ColocateWorkerExtension"`. The trainer makes
    the handles with `parallelkit_vllm.share_weights(model).handles()`. As for requests and the
    prefix cache, see `WorkerExtension`.
    """

    device_uuid: str

    def report_device_id(self) -> str:
        """Name the memory that this worker reads: the key of its handles."""
        answer(self, lambda: _receiver(self))
        self.device_uuid = sharing.device_id()
        return self.device_uuid

    def update_weights_from_ipc_handles(self, ipc_handles: Any) -> None:
        """Copy the tensors that handles name, and put them in place once there are all of them.

        Several calls may bring parts of a model; see `WorkerExtension.update_weight`. Every handle
        of a call is checked, and every tensor copied and compared with its digest, before any is
        taken.

        Args:
            ipc_handles: by device id, by name, as `SharedWeights.handles()` gives them.

        Raises:
            ManifestError: these are no such handles, or none for this worker.
            ManifestMismatchError: the engine has no such tensor.
            TransportError: the memory cannot be reached.
            CorruptionError: handles that are not the newest.
            NonFiniteError, ReloadError: see `WorkerExtension.update_weight`.
        """
        answer(self, lambda: _update_from(self, ipc_handles))

    def check_weights_changed(self) -> bool:
        """Whether an update took effect; see `WorkerExtension.check_weights_changed`."""
        return bool(answer(self, lambda: _receiver(self).changed()))


# --- functions, since a worker must have no other attributes of ours -----------------------------


def _join(worker: Any, address: str, port: int, rank_offset: int, world_size: int) -> None:
    _receiver(worker).forget()
    _leave(worker)
    rank = worker_rank(worker.vllm_config) + rank_offset
    try:
        worker.model_update_group = stateless_init_process_group(
            address, port, rank, world_size, _device(worker)
        )
    except RendezvousTimeoutError as error:
        raise RendezvousTimeoutError(
            f"{error}. Also, {_TOGETHER}", missing=error.missing
        ) from error


def _update(worker: Any, name: str, dtype: Any, shape: Any) -> None:
    group = getattr(worker, "model_update_group", None)
    if group is None:
        raise StateError("update_weight was called before init_weight_update_group")
    receiver = _receiver(worker)
    try:
        admitted = receiver.admit(name, dtype, shape)
    except ParallelKitError as error:
        group.refuse(str(error))
        raise
    tensor = torch.empty(admitted.spec.shape, dtype=DTYPES[admitted.spec.dtype], device="cpu")
    try:
        group.broadcast(tensor, src=0)
    except CollectiveTimeoutError as error:
        raise CollectiveTimeoutError(
            f"{name!r} did not come: {error}. Also, {_TOGETHER}", missing=error.missing
        ) from error
    receiver.take(admitted, prepare(admitted, tensor))


def _update_from(worker: Any, ipc_handles: Any) -> None:
    receiver = _receiver(worker)
    mine = ipc_handles.get(sharing.device_id()) if isinstance(ipc_handles, dict) else None
    if not isinstance(mine, dict):
        keys = list(ipc_handles) if isinstance(ipc_handles, dict) else type(ipc_handles)
        raise ManifestError(
            f"there are no handles for {sharing.device_id()!r}, only {keys!r:.300}; the trainer "
            "makes them by parallelkit_vllm.share_weights(model).handles(), on the same host"
        )
    checked = []
    for name, given in mine.items():
        handle, spec = sharing.parse(name, given)
        checked.append((handle, receiver.admit(name, spec.dtype, spec.shape)))
    with sharing.Reader() as reader:
        taken = [(a, prepare(a, reader.read(handle, a.spec))) for handle, a in checked]
    for admitted, tensor in taken:
        receiver.take(admitted, tensor)


def _receiver(worker: Any) -> Receiver:
    """The worker's receiver, made at the first call; from then on changes are noticed."""
    found: Receiver | None = getattr(worker, "_parallelkit_receiver", None)
    if found is None:
        check_version()
        _device(worker)
        found = Receiver(worker.model_runner.get_model(), worker.vllm_config)
        worker._parallelkit_receiver = found
    return found


def _device(worker: Any) -> torch.device:
    device: torch.device = worker.device
    if device.type != "cpu":
        raise UnsupportedFeatureError(
            f"this worker computes on {device}; these worker extensions support the CPU so far. "
            "Use pk.publish_weights(model) and publisher.attach(engine), with the engine's "
            'weight_transfer_config={"backend": "parallelkit"}'
        )
    return device


def _leave(worker: Any) -> None:
    group = getattr(worker, "model_update_group", None)
    if group is not None:
        group.close()
        worker.model_update_group = None
