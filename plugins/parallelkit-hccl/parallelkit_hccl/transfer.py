"""Weights from one rank's device memory into everyone's: by tensor, or packed into buffers."""

from __future__ import annotations

import contextlib
import hashlib
import math
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import attrs

from parallelkit.errors import ManifestMismatchError
from parallelkit.weights.endpoint import check_timeout
from parallelkit.weights.manifest import Manifest, TensorSpec
from parallelkit_hccl import abi
from parallelkit_hccl.communicator import HcclCommunicator
from parallelkit_hccl.errors import HcclArgumentError, HcclError
from parallelkit_hccl.packing import BUFFER_BYTES, Chunk, Packing, plan_chunks, staging_bytes
from parallelkit_hccl.steps import Broadcast, Copy, Step

#: Frameworks' names of dtypes in lower case, where they are not ours.
_NAMES: Final = {"float8e4m3fn": "float8_e4m3fn", "float8e5m2": "float8_e5m2", "bool_": "bool"}


@attrs.frozen
class DeviceTensor:
    """A tensor where it lies.

    Attributes:
        spec: name, dtype, shape.
        pointer: address of its contiguous row-major bytes; unused where there are none.
        owner: the tensor that the memory belongs to. It is kept alive, and asked once more for
            its address before anything is moved. None for an address that is given by hand: then
            nothing keeps that memory, nor notices that it was freed or given to another tensor.
            Whoever gives it holds the memory until `send` or `receive` has returned.
    """

    spec: TensorSpec
    pointer: int = attrs.field()
    owner: Any = attrs.field(default=None, eq=False, repr=False)

    @pointer.validator
    def _points(self, attribute: object, value: int) -> None:
        good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64
        if not good or (value == 0 and self.spec.nbytes):
            raise HcclArgumentError(
                f"tensor {self.spec.name!r} ({self.spec.describe()}) lies at {value!r}, which is "
                "no address"
            )

    def check_place(self) -> None:
        """Raise `HcclArgumentError` if its owner lies elsewhere by now."""
        if self.owner is not None and self.spec.nbytes and _address(self.owner) != self.pointer:
            raise HcclArgumentError(
                f"tensor {self.spec.name!r} ({self.spec.describe()}) was given other memory since "
                "it was located; call located() anew for each update"
            )


@attrs.frozen(kw_only=True)
class HcclReport:
    """What one `send` or `receive` moved.

    Attributes:
        nbytes: of the tensors; broadcasts: how many they took.
        seconds: from the first to the last, the comparison of manifests left out.
    """

    nbytes: int
    broadcasts: int
    seconds: float


def located(tensors: Iterable[tuple[str, Any]]) -> list[DeviceTensor]:
    """Find out where tensors of MindSpore or torch lie.

    A tensor is anything with `dtype`, `shape`, `data_ptr()` and `is_contiguous()`. What comes back
    keeps the tensors alive: temporary copies may be given. A tensor that is given other memory
    afterwards (MindSpore's `set_data`) is refused when it is moved, so do this anew for each
    update. Neither framework is imported.

    Raises:
        HcclArgumentError: there is no pair of a name and such a tensor, or one is not contiguous.
        ManifestError: a name, dtype or shape that cannot be sent.
    """
    if not isinstance(tensors, Iterable):
        raise HcclArgumentError(
            f"located got {tensors!r:.80}; it takes pairs of a name and a tensor, such as "
            "model.named_parameters() or cell.parameters_and_names()"
        )
    return [_located(pair) for pair in tensors]


def _located(pair: Any) -> DeviceTensor:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise HcclArgumentError(f"{pair!r:.80} is no pair of a name and a tensor")
    name, tensor = pair
    lacks = [n for n in ("dtype", "shape", "data_ptr", "is_contiguous") if not hasattr(tensor, n)]
    if lacks:
        raise HcclArgumentError(
            f"{name!r:.80} is a {type(tensor).__qualname__} without {', '.join(lacks)}; give a "
            "tensor of MindSpore or torch"
        )
    said = str(tensor.dtype).rpartition(".")[2].lower()
    dtype = _NAMES.get(said, said)
    spec = TensorSpec(name=name, dtype=dtype, shape=tuple(int(n) for n in tensor.shape))
    try:
        contiguous, pointer = tensor.is_contiguous(), _address(tensor)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        raise HcclArgumentError(
            f"tensor {name!r} ({spec.describe()}) has no memory of its own: {error}"
        ) from error
    if not contiguous:
        raise HcclArgumentError(
            f"tensor {name!r} ({spec.describe()}) is not contiguous; send a contiguous copy"
        )
    return DeviceTensor(spec, pointer, tensor)


def _address(tensor: Any) -> int:
    return int(tensor.data_ptr())


#: What is moved: located already, or to be.
Tensors: TypeAlias = Iterable[DeviceTensor | tuple[str, Any]]


class _Transfer:
    """What both ends share: they differ in the order of copying and broadcasting only."""

    def __init__(
        self, communicator: HcclCommunicator, packing: Packing | None, compare: bool, root: int
    ) -> None:
        whole = isinstance(root, int) and not isinstance(root, bool)
        if not whole or not 0 <= root < communicator.world_size:
            raise HcclArgumentError(
                f"root is {root!r}; ranks go from 0 to {communicator.world_size - 1}"
            )
        self._communicator = communicator
        self._packing = packing
        self._compare = compare
        self._root = root
        self._staging = self._staging_bytes = 0

    def _move(self, tensors: Tensors, timeout: float | None) -> HcclReport:
        try:
            found, manifest, chunks = self._prepare(tensors, timeout)
        except Exception:
            self._tell_of_failure()
            raise
        if self._compare:
            self._compare_manifests(manifest, timeout)
        began = time.monotonic()
        deadline = began + (self._communicator.timeout if timeout is None else timeout)
        broadcasts = 0
        for number, chunk in enumerate(chunks, 1):
            steps = self._packed(found, chunk) if self._packing else self._single(found, chunk)
            broadcasts += sum(isinstance(step, Broadcast) for step in steps)
            first, last = (found[chunk.pieces[at].index].spec.name for at in (0, -1))
            what = f"moving {first!r} to {last!r} (part {number} of {len(chunks)})"
            left = max(0.001, deadline - time.monotonic())
            self._communicator.run(steps, what, timeout=left)
        return HcclReport(
            nbytes=manifest.nbytes, broadcasts=broadcasts, seconds=time.monotonic() - began
        )

    def _prepare(
        self, tensors: Tensors, timeout: float | None
    ) -> tuple[list[DeviceTensor], Manifest, Sequence[Chunk]]:
        """All that can fail on this rank alone."""
        if timeout is not None:
            check_timeout(timeout)
        if not isinstance(tensors, Iterable):
            raise HcclArgumentError(f"{tensors!r:.80} was given; see located()")
        # The list holds the memory until all of it is moved.
        found = [t if isinstance(t, DeviceTensor) else _located(t) for t in tensors]
        for tensor in found:
            tensor.check_place()
        manifest = Manifest([tensor.spec for tensor in found])
        size = self._packing.buffer_bytes if self._packing else BUFFER_BYTES
        chunks = plan_chunks([spec.nbytes for spec in manifest.tensors], size)
        if self._packing:
            self._stage(staging_bytes(chunks))
        return found, manifest, chunks

    def _tell_of_failure(self) -> None:
        """Take part in the comparison that the peers make, so that this call fails for them, too.

        Else they would wait, and take this rank's next call for the one that failed.
        """
        if self._compare and self._communicator.state == "open":
            with contextlib.suppress(HcclError):  # what failed first is what the caller learns
                self._communicator.agree(secrets.token_bytes(16))  # like nobody else's

    def _single(self, tensors: Sequence[DeviceTensor], chunk: Chunk) -> list[Step]:
        steps: list[Step] = []
        for piece in chunk.pieces:
            tensor = tensors[piece.index]
            dtype, count = on_the_wire(tensor.spec)
            steps.append(self._broadcast(tensor.pointer, count, dtype, tensor.spec.name))
        return steps

    def _packed(self, tensors: Sequence[DeviceTensor], chunk: Chunk) -> list[Step]:
        if len(chunk.pieces) == 1:  # it is its own buffer
            tensor = tensors[chunk.pieces[0].index]
            return [self._broadcast(tensor.pointer, chunk.nbytes, "uint8", tensor.spec.name)]
        buffer = self._staging
        name = f"a buffer of {len(chunk.pieces)} tensors"
        broadcast = self._broadcast(buffer, chunk.nbytes, "uint8", name)
        placed = [
            (buffer + piece.offset, tensors[piece.index].pointer, piece.nbytes)
            for piece in chunk.pieces
            if piece.nbytes
        ]
        if self._communicator.rank == self._root:
            return [*(Copy(packed, own, size) for packed, own, size in placed), broadcast]
        return [broadcast, *(Copy(own, packed, size) for packed, own, size in placed)]

    def _broadcast(self, pointer: int, count: int, dtype: str, name: str) -> Broadcast:
        # Nothing is read or written for a count of 0, but the call is made: the peer makes it.
        return Broadcast(pointer or self._communicator.scratch, count, dtype, self._root, name)

    def _compare_manifests(self, manifest: Manifest, timeout: float | None) -> None:
        how = repr((manifest.digest(), self._packing and self._packing.buffer_bytes, self._root))
        digest = hashlib.blake2b(how.encode(), digest_size=16).digest()
        if self._communicator.agree(digest, timeout=timeout):
            return
        raise ManifestMismatchError(
            f"rank {self._communicator.rank} of {self._communicator.world_size} has "
            f"{len(manifest.tensors)} tensors of {manifest.nbytes} bytes, and some rank has other "
            "names, dtypes, shapes, order, packing or root, or an error of its own that it "
            "raised. Nothing was moved; give every rank the same"
        )

    def _stage(self, nbytes: int) -> None:
        if nbytes <= self._staging_bytes and self._staging:
            return
        self.close()
        self._staging = self._communicator.allocate(max(1, nbytes))
        self._staging_bytes = nbytes

    def close(self) -> None:
        """Free the buffer of packed transfers, if the communicator works; else its close does."""
        pointer, self._staging, self._staging_bytes = self._staging, 0, 0
        if pointer and self._communicator.state == "open":
            self._communicator.free(pointer)


class HcclSender(_Transfer):
    """The rank whose weights everyone gets.

    Not a transport of `publish_weights`: those write into an arena of host memory, while HCCL
    reads the model's own device memory.
    """

    def __init__(
        self,
        communicator: HcclCommunicator,
        *,
        packing: Packing | None = None,
        compare: bool = True,
    ) -> None:
        """Prepare; nothing is called.

        Args:
            communicator: an open one; this rank is the root.
            packing: None broadcasts tensor by tensor.
            compare: have all ranks compare their manifests before anything is moved. Off for
                peers that do not: `parallelkit_hccl.compat`.
        """
        super().__init__(communicator, packing, compare, communicator.rank)

    def send(self, tensors: Tensors, *, timeout: float | None = None) -> HcclReport:
        """Send all tensors, in this order. Collective; blocks until every rank has them.

        What computes them on another stream has to be finished (`mindspore.runtime.synchronize`),
        and nothing may write them meanwhile. Nothing checks that bytes arrive as they were sent.

        Args:
            tensors: pairs of a name and a tensor, as `located` takes them, or what it gave. Pairs
                are better: an error in locating them is then told to the peers.

        Raises:
            ManifestMismatchError: a rank expects other tensors, or raised an error of its own;
                nothing was moved, and the communicator goes on working.
            HcclArgumentError, ManifestError: the tensors cannot be sent. With `compare` the peers
                are told before it is raised, which waits for them, for the communicator's timeout
                at most; they get a `ManifestMismatchError` for this call.
            HcclStateError, HcclTimeoutError, HcclError: see `HcclCommunicator.run`; receivers
                then hold a mixture of old and new.
        """
        return self._move(tensors, timeout)


class HcclReceiver(_Transfer):
    """A rank that gets them, into memory that is there already."""

    def __init__(
        self,
        communicator: HcclCommunicator,
        *,
        root: int = 0,
        packing: Packing | None = None,
        compare: bool = True,
    ) -> None:
        """As `HcclSender`; `root` is the sender's rank."""
        super().__init__(communicator, packing, compare, root)
        if root == communicator.rank:
            raise HcclArgumentError(f"rank {root} cannot receive from itself; it is the sender")

    def receive(self, tensors: Tensors, *, timeout: float | None = None) -> HcclReport:
        """Overwrite all tensors with the sender's. Collective; blocks until they are here.

        Raises:
            As `HcclSender.send`.
        """
        return self._move(tensors, timeout)


def on_the_wire(spec: TensorSpec) -> tuple[str, int]:
    """HCCL's dtype and count for one tensor: its own, else its bytes."""
    if spec.dtype in abi.DTYPES:
        return spec.dtype, math.prod(spec.shape)
    return "uint8", spec.nbytes
