"""Mode `"auto"`: look at the model and the devices, search for degrees, agree on them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from parallelkit.errors import PlanError
from parallelkit.protocols import ProcessGroup
from parallelkit.search import Search, search
from parallelkit.shapes import Hardware, ModelShape, Training
from parallelkit.specs import ContextSpec
from parallelkit_torch.parallel.shape import describe_model
from parallelkit_torch.parallel.units import anatomy

#: Bytes of optimizer state for a byte of parameters, by name.
OPTIMIZERS: Final[Mapping[str, float]] = {"adamw": 2.0, "adam": 2.0, "momentum": 1.0, "sgd": 0.0}
#: What is assumed of links and devices that nobody described, by type of device.
LINKS: Final[Mapping[str, Mapping[str, float]]] = {
    "cpu": {"flops": 5e10, "inside": 5e9, "between": 1e9, "latency": 5e-5},
    "cuda": {"flops": 4e14, "inside": 2e11, "between": 2.5e10, "latency": 1e-5},
}


@attrs.frozen(kw_only=True)
class Request:
    """Options of mode `"auto"`, checked.

    Attributes:
        model: the model to be spread, on any device, also meta.
        example: a batch as the model takes it; None: activations count as nothing.
        loss: of the model's output; None: a cross-entropy.
        memory: bytes of one device; None: those of the device, or of the host shared by its ranks.
        devices_per_host: None: as many as the fullest host has ranks.
        global_batch: items of one optimizer step over all ranks; None: one example for each rank.
        microbatches: of each rank and step; None: searched.
        optimizer: one of `OPTIMIZERS`, or bytes of state for a byte of trainable parameters.
        links: rates that replace those of `LINKS`: `flops`, `inside`, `between`, `latency`.
        reserve: share of a device's memory that is left alone.
    """

    model: nn.Module
    example: Any = None
    loss: Callable[[Any], torch.Tensor] | None = None
    memory: int | None = None
    devices_per_host: int | None = None
    global_batch: int | None = None
    microbatches: int | None = None
    optimizer: str | float = "adamw"
    links: Mapping[str, float] = attrs.field(factory=dict)
    reserve: float = 0.1

    @classmethod
    def split(cls, options: Mapping[str, Any]) -> tuple[Request, dict[str, Any]]:
        """Take the options of the search; return the others too.

        Raises:
            PlanError: no model, or a value that is not allowed.
        """
        names = {field.name for field in attrs.fields(cls)}
        mine = {name: value for name, value in options.items() if name in names}
        if not isinstance(mine.get("model"), nn.Module):
            raise PlanError(
                f"mode 'auto' looks at the model, and model is {mine.get('model')!r:.100}: call "
                "pk.parallel_context('auto', model=model, example=batch); the model may be on the "
                "meta device"
            )
        made = cls(**mine)
        made.state()
        unknown = sorted(set(made.links) - set(LINKS["cpu"]))
        if unknown:
            raise PlanError(f"links has {unknown}; it has {', '.join(LINKS['cpu'])}")
        made.hardware("cpu", 1 if made.memory is None else made.memory, 1)
        return made, {name: value for name, value in options.items() if name not in names}

    def hardware(self, kind: str, memory: int, per_host: int) -> Hardware:
        """Describe devices of a kind: `memory` bytes, the rest as said by the user or assumed."""
        return Hardware(
            memory=memory,
            reserve=self.reserve,
            devices_per_host=per_host if self.devices_per_host is None else self.devices_per_host,
            **{**LINKS.get(kind, LINKS["cuda"]), **self.links},
        )

    def state(self) -> float:
        """Bytes of optimizer state for a byte of trainable parameters."""
        if isinstance(self.optimizer, str) and self.optimizer in OPTIMIZERS:
            return OPTIMIZERS[self.optimizer]
        real = isinstance(self.optimizer, int | float) and not isinstance(self.optimizer, bool)
        if real and 0 <= float(self.optimizer) <= 100:
            return float(self.optimizer)
        raise PlanError(
            f"optimizer is {self.optimizer!r}; it is one of {', '.join(map(repr, OPTIMIZERS))}, or "
            "bytes of its state for a byte of parameters"
        )


def choose(spec: ContextSpec, group: ProcessGroup) -> tuple[Search, dict[str, Any]]:
    """Search for the degrees that `spec` leaves open. Collective over `group`.

    Ranks exchange two numbers each, memory and local rank, so that all search for the same
    devices; it blocks until all are here, up to the group's timeout. The search itself is pure.

    Args:
        spec: of mode `"auto"`; its options are those of `Request`, and of the context.
        group: for the world size and the device.

    Returns:
        The search, whose best plan is to be taken; the options that are the context's, with
        `stages` as the search assumed them, where the user gave none.

    Raises:
        PlanError: an option is not allowed.
        ExampleError: the example does not run through the model.
        NoPlanError: no plan is possible, or none fits.
    """
    request, rest = Request.split(spec.options)
    training = _training(request, rest, group)
    shape = _shape(request, rest, group.device)
    hardware = _hardware(request, group)
    found = search(shape, group.world_size, hardware, training, pinned=spec.pinned)
    best = found.best
    if best.plan.pipeline > 1 and "stages" not in rest and rest.get("virtual_stages", 1) == 1:
        names = {unit[0]: list(unit) for unit in anatomy(request.model).units}
        rest["stages"] = [[n for unit in stage for n in names[unit]] for stage in best.stages]
    return found, rest


def _shape(request: Request, rest: Mapping[str, Any], device: str) -> ModelShape:
    return describe_model(
        request.model,
        request.example,
        rest.get("layouts"),
        blocks=rest.get("blocks"),
        loss=request.loss,
        device=torch.device(device).type,
    )


def _training(request: Request, rest: Mapping[str, Any], group: ProcessGroup) -> Training:
    batch = request.global_batch
    if batch is None:
        sizes = [x.shape[0] for x in tree_leaves(request.example) if isinstance(x, torch.Tensor)]
        batch = group.world_size * (sizes[0] if sizes else 1)
    adam, gpu = request.state() >= 2, torch.device(group.device).type != "cpu"
    return Training(
        batch=batch,
        microbatches=request.microbatches,
        state=request.state(),
        update=1.0 if adam and gpu else 0.0,  # all tensors at once, which takes roots of all
        bucket_views=bool(rest.get("gradient_as_bucket_view", False)),
        all_in_flight=rest.get("schedule") == "gpipe",
    )


def _hardware(request: Request, group: ProcessGroup) -> Hardware:
    """Describe the weakest device and the fullest host, the same on every rank."""
    device = torch.device(group.device)
    mine = torch.tensor(
        [request.memory or device_memory(device), group.local_rank],  # 0 was refused before
        dtype=torch.float64,
        device=group.device,
    )
    everyone = [[int(x) for x in other.tolist()] for other in group.all_gather(mine)]
    per_host = request.devices_per_host or max(local for _, local in everyone) + 1
    memory = min(memory for memory, _ in everyone)
    if request.memory is None and device.type == "cpu":  # ranks of a host share its memory
        memory //= per_host
    return request.hardware(device.type, memory, per_host)


def device_memory(device: torch.device) -> int:
    """Return bytes of a device's memory; for the CPU, what the host or a control group allows."""
    if device.type == "cpu":
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        try:
            limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        except OSError:
            return physical
        return min(physical, int(limit)) if limit.isdigit() else physical
    module: Any = getattr(torch, device.type)
    return int(module.mem_get_info(device)[1])
