"""Whether one process can read another's GPU memory: each reason why not, and none besides."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from parallelkit_torch.cuda import probe
from parallelkit_torch.cuda.driver import Driver
from parallelkit_torch.cuda.errors import CudaUnavailableError
from parallelkit_torch.cuda.probe import Survey, reach

from parallelkit.specs import HostIdentity

HOST = HostIdentity(boot_id="one", uid=1, pid=10, pid_namespace=5, ipc_namespace=6)
OWNER = Survey(host=HOST, device="GPU-a", reads=("GPU-a",), sees=("GPU-a",), fused=True)
READER = Survey(
    host=attrs.evolve(HOST, pid=11),
    device="GPU-a",
    reads=("GPU-a", "GPU-b"),
    sees=("GPU-a", "GPU-b", "GPU-c"),
    fused=True,
)


def test_one_gpu_and_two() -> None:
    assert reach(READER, OWNER) == probe.Reach(same_device=True)
    other = attrs.evolve(OWNER, device="GPU-b")
    assert reach(READER, other) == probe.Reach(same_device=False)
    assert reach(READER, other).possible


@pytest.mark.parametrize(
    ("owner", "says"),
    [
        ({"host": attrs.evolve(HOST, boot_id="two", uid=2)}, "differ in host"),
        ({"host": attrs.evolve(HOST, pid_namespace=7)}, "PID namespace"),
        ({"host": attrs.evolve(HOST, ipc_namespace=7)}, "IPC namespace"),
        ({"host": attrs.evolve(HOST, uid=2)}, "differ in user"),
        ({"host": READER.host}, "one process"),
        ({"device": "GPU-c"}, "no peer access to GPU-c"),
        ({"obstacles": ("memory is virtual",), "device": ""}, "the owner: memory is virtual"),
    ],
)
def test_each_reason_alone(owner: dict[str, Any], says: str) -> None:
    found = reach(READER, attrs.evolve(OWNER, **owner))
    assert len(found.reasons) == 1
    assert says in found.reasons[0]
    assert not found.possible


def test_all_reasons_are_given() -> None:
    reader = attrs.evolve(READER, obstacles=("no CUDA",))
    owner = attrs.evolve(OWNER, device="GPU-c", host=attrs.evolve(HOST, uid=2))
    assert len(reach(reader, owner).reasons) == 3


def test_without_triton_it_is_possible_and_slower() -> None:
    found = reach(attrs.evolve(READER, fused=False), OWNER)
    assert found.possible
    assert "Triton" in found.remarks[0]


def test_a_device_that_the_reader_does_not_see_is_a_remark() -> None:
    found = reach(READER, attrs.evolve(OWNER, device="GPU-d"))
    assert found.possible
    assert not found.same_device
    assert "does not see GPU-d" in found.remarks[0]


def test_weights_on_the_cpu_say_so() -> None:
    assert "not on a CUDA device" in probe.survey("cpu").obstacles[0]


def test_without_cuda_the_survey_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> Driver:
        raise CudaUnavailableError("NVIDIA's driver cannot be loaded: no such file")

    monkeypatch.setattr(torch.version, "cuda", None)
    assert "not built for NVIDIA's CUDA" in probe.survey("cuda:0").obstacles[0]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(Driver, "load", load)
    found = probe.survey("cuda:0")
    assert found.obstacles == ("NVIDIA's driver cannot be loaded: no such file",)
    assert not reach(READER, found).possible


def test_the_survey_of_a_driver(monkeypatch: pytest.MonkeyPatch, driver: Any) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = probe.survey("cuda:1", host=HOST, driver=driver)
    assert found.device == "GPU-31313131-3131-3131-3131-313131313131"
    assert len(found.reads) == len(found.sees) == 2
    assert not found.obstacles
    assert "does not exist" in probe.survey("cuda:2", driver=driver).obstacles[0]
    bad = probe.survey("cuda:0", [torch.zeros(0), torch.zeros(1)], driver=driver)
    assert "1 of 2 tensors, the first at position 1" in bad.obstacles[0]


def test_a_driver_without_a_function_is_too_old() -> None:
    with pytest.raises(CudaUnavailableError, match="has no cuInit"):
        Driver(object())  # type: ignore[arg-type]
