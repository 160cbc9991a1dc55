"""Whether one process can read another's GPU memory, with every reason why not.

Each end finds out about itself by `survey`, tells the other, and both judge by `reach`: no CUDA
call is made with anything a peer said.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Final

import attrs
import torch

from parallelkit.specs import Accelerator, HostIdentity
from parallelkit.weights.identity import host_identity
from parallelkit_torch.cuda import backing
from parallelkit_torch.cuda.driver import shown
from parallelkit_torch.cuda.errors import CudaUnavailableError, IpcError

_TRITON: Final = "Triton is not installed: tensors are copied one by one"


@attrs.frozen(kw_only=True)
class Survey:
    """What one end knows of itself.

    Attributes:
        host: where it runs.
        device: UUID of the device that its weights are on, as nvidia-smi writes it; `""`: none.
        reads: UUIDs of the devices whose memory that device can read, itself among them.
        sees: UUIDs of the devices that the process sees.
        fused: whether copies go by the one kernel.
        obstacles: why its memory can neither be exported nor read; empty if it can.
    """

    host: HostIdentity
    device: str = ""
    reads: tuple[str, ...] = ()
    sees: tuple[str, ...] = ()
    fused: bool = False
    obstacles: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Reach:
    """Whether a reader can read an owner's memory.

    Attributes:
        reasons: why not; empty if it can.
        same_device: both are on one GPU.
        remarks: what makes it slower than it could be, and what is not known beforehand.
    """

    reasons: tuple[str, ...] = ()
    same_device: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def possible(self) -> bool:
        """Whether nothing stands in the way."""
        return not self.reasons


def survey(
    device: torch.device | str,
    tensors: Sequence[torch.Tensor] = (),
    *,
    host: HostIdentity | None = None,
    driver: backing.Backing | None = None,
) -> Survey:
    """Find out about this process; starts CUDA on the device if it can.

    Args:
        device: where the weights are; without an index, the current one.
        tensors: the owner's: whether each can be exported is asked of the driver.
        host, driver: found where not given.
    """
    place, here = torch.device(device), host or host_identity()

    def without(*reasons: str) -> Survey:
        return Survey(host=here, obstacles=reasons)

    if torch.version.cuda is None and place.type == "cuda":
        return without(f"torch {torch.__version__} is not built for NVIDIA's CUDA")
    if not backing.shares(place):
        return without(f"the weights are on {place}, not on a CUDA device")
    try:
        driver = driver or backing.driver()
        index = backing.index_of(place)
        sees = [driver.uuid(i) for i in range(driver.count())]
        if index >= len(sees):
            return without(f"{place} does not exist; this process sees {len(sees)} CUDA devices")
        reads = [u for i, u in enumerate(sees) if driver.peers(index, i)]
        obstacles = _unsharable(driver, tensors)
    except (IpcError, RuntimeError) as error:
        known = isinstance(error, CudaUnavailableError)
        return without(str(error) if known else f"CUDA does not work here: {error}")
    return Survey(
        host=here,
        device=shown(sees[index]),
        reads=tuple(map(shown, reads)),
        sees=tuple(map(shown, sees)),
        fused=find_spec("triton") is not None,
        obstacles=obstacles,
    )


def reach(reader: Survey, owner: Survey) -> Reach:
    """Judge whether `reader` can read what `owner` exports; pure."""
    reasons = [f"the reader: {reason}" for reason in reader.obstacles]
    reasons += [f"the owner: {reason}" for reason in owner.obstacles]
    for what, name in _ALIKE.items():
        mine, theirs = getattr(reader.host, name), getattr(owner.host, name)
        if mine != theirs:
            reasons.append(f"they differ in {what} (reader {mine}, owner {theirs})")
            break  # the first says it: what follows is counted per host or namespace
    else:
        if reader.host.pid == owner.host.pid:
            reasons.append("both are one process, and CUDA maps memory in other processes only")
    remarks = [] if reader.fused or not reader.device else [_TRITON]
    if owner.device and reader.device:
        if owner.device not in reader.sees:
            remarks.append(
                f"the reader does not see {owner.device}, so it cannot ask for peer access to it "
                "beforehand; opening the memory will tell"
            )
        elif owner.device not in reader.reads:
            reasons.append(
                f"{reader.device} has no peer access to {owner.device}: no link between them lets "
                "one read the other's memory"
            )
    return Reach(
        reasons=tuple(reasons),
        same_device=bool(reader.device) and reader.device == owner.device,
        remarks=tuple(remarks),
    )


def accelerator_of(
    tensors: Sequence[torch.Tensor], *, exported: bool = False
) -> Accelerator | None:
    """What this process knows of the device that tensors are on; None: they are on none.

    Args:
        tensors: tensors on the CPU besides those on a GPU are allowed.
        exported: others are to read them, else only this process itself writes them.
    """
    places = dict.fromkeys(t.device for t in tensors if backing.shares(t.device))
    if not places:
        return None
    place = next(iter(places))
    if len(places) > 1:
        text = f"the weights are on several GPUs of one process: {', '.join(map(str, places))}"
        return Accelerator(obstacles=(text,))
    here = [t for t in tensors if t.device == place] if exported else []
    found = survey(place, here)
    return Accelerator(
        device=found.device,
        reads=found.reads,
        sees=found.sees,
        fused=found.fused,
        obstacles=found.obstacles,
    )


def survey_of(identity: HostIdentity) -> Survey:
    """What another process found out about itself."""
    known = identity.accelerator
    if known is None:
        return Survey(host=identity, obstacles=("its weights are on no GPU",))
    return Survey(
        host=identity,
        device=known.device,
        reads=known.reads,
        sees=known.sees,
        fused=known.fused,
        obstacles=known.obstacles,
    )


_ALIKE: Final = {
    "host": "boot_id",
    "PID namespace, as containers without --pid=host do": "pid_namespace",
    "IPC namespace, as containers without --ipc=host do": "ipc_namespace",
    "user": "uid",
}


def _unsharable(driver: Any, tensors: Sequence[torch.Tensor]) -> tuple[str, ...]:
    bad = [
        i
        for i, tensor in enumerate(tensors)
        if tensor.numel()
        and not (backing.shares(tensor.device) and driver.sharable(tensor.data_ptr()))
    ]
    if not bad:
        return ()
    return (
        f"{len(bad)} of {len(tensors)} tensors, the first at position {bad[0]}, lie in memory that "
        "no handle can be made of: on another kind of device, or allocated by virtual memory "
        "(torch: PYTORCH_CUDA_ALLOC_CONF with expandable_segments:True; vLLM: sleep mode)",
    )
