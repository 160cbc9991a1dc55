"""The device of a rank, checked and claimed before any backend starts."""

from __future__ import annotations

from typing import Any

from parallelkit.errors import DeviceError, UnsupportedFeatureError
from parallelkit.specs import GroupSpec
from parallelkit_mindspore import native, runtime

_CONTEXTS = {"cpu": "cpu", "cuda": "gpu", "npu": "ascend"}


def parse(spec: GroupSpec) -> tuple[str, int]:
    """Return the device type and index that `spec` asks for; pure.

    Raises:
        DeviceError: MindSpore has no device of that name.
    """
    kind, colon, index = spec.device.partition(":")
    if kind not in native.TARGETS or (colon and not index.isdecimal()):
        raise DeviceError(
            f"device {spec.device!r} is unknown to the MindSpore plugin; it has 'cpu', 'npu' "
            "(Ascend) and 'cuda' (GPU), with or without an index: 'npu:1'"
        )
    return kind, int(index) if colon else (0 if kind == "cpu" else spec.local_rank)


def check_backend(backend: str, kind: str) -> None:
    """Raise `UnsupportedFeatureError`, naming the one there is, unless `backend` serves `kind`."""
    have = native.BACKENDS[kind]
    if backend.lower() != have:
        raise UnsupportedFeatureError(
            f"backend {backend!r} cannot run on {kind} with MindSpore; there it has {have!r}"
        )


def claim(kind: str, index: int) -> str:
    """Make this the process's device and return its name, as `"npu:1"` or `"cpu"`.

    This comes before the backend: one that starts first binds every rank to device 0.

    Raises:
        DeviceError: this MindSpore has no such device, or uses another one already.
    """
    ms = runtime.mindspore("init_process_group")
    if kind != "cpu":
        _check_available(ms, kind)
    try:
        native.set_device(kind, index)
    except (RuntimeError, ValueError) as error:
        if kind == "cpu" and native.device_target() == "CPU":
            return "cpu"  # something ran there already; there is one device, and this is it
        raise DeviceError(
            f"MindSpore {ms.__version__} cannot use {kind}:{index}: {str(error).splitlines()[0]} "
            "Choose the device before the first tensor, and the same one everywhere"
        ) from error
    return "cpu" if kind == "cpu" else f"{kind}:{index}"


def _check_available(ms: Any, kind: str) -> None:
    context = getattr(getattr(ms, "device_context", None), _CONTEXTS[kind], None)
    if context is not None and not context.is_available():
        raise DeviceError(
            f"device {kind!r} was asked for, and MindSpore {ms.__version__} finds none here; use "
            "device='cpu', or install a build of MindSpore, and the driver, for it"
        )
