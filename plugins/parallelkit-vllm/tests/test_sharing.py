"""Weights in shared memory, by handles that are data alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_qwen as tiny

torch = pytest.importorskip("torch")

from parallelkit_vllm import live, sharing
from parallelkit_vllm.sharing import Reader, device_id, parse, share_weights

from parallelkit.errors import CorruptionError, ManifestError, NoBackendError, TransportError

GIVEN = {
    "a": tiny.Raw("bfloat16", (3, 2), bytes(range(12))),
    "nothing": tiny.Raw("float32", (0, 4), b""),
    "scalar": tiny.Raw("int8", (), b"\7"),
    "b": tiny.Raw("float32", (2,), bytes(range(1, 9))),
}


@pytest.fixture
def source():
    return tiny.Source(GIVEN, aliases={"tied": "a"})


@pytest.fixture(params=[False, True], ids=["nameless", "named"])
def shared(source, request):
    with share_weights(source, named=request.param) as shared:
        yield shared


def read(handles):
    found = {}
    with Reader() as reader:
        for name, given in handles[device_id()].items():
            handle, spec = parse(name, given)
            tensor = reader.read(handle, spec)
            found[name] = (spec.dtype, spec.shape, bytes(live.as_bytes(tensor)))
    return found


def test_what_is_read_is_what_was_shared(shared):
    handles = shared.handles()
    assert list(handles) == [device_id()]
    assert handles == json.loads(json.dumps(handles)), "tables, texts and numbers alone"
    expected = {name: tuple(raw) for name, raw in GIVEN.items()}
    assert read(handles) == expected | {"tied": expected["a"]}
    assert handles[device_id()]["tied"] == handles[device_id()]["a"]


def test_another_process_reads_it(shared):
    """And cannot write: its mapping is read-only."""
    script = (
        "import json, sys\n"
        "from parallelkit_vllm.sharing import Reader, parse\n"
        "handles = json.load(sys.stdin)\n"
        "with Reader() as reader:\n"
        "    (table,) = handles.values()\n"
        "    found = {n: reader.read(*parse(n, h)).float().tolist() for n, h in table.items()}\n"
        "    assert reader._open(parse('a', table['a'])[0]).arena.readonly\n"
        "print(json.dumps(found))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(shared.handles()),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["a"] == found["tied"] == GIVEN["a"].values.tolist()
    assert (found["scalar"], found["nothing"]) == (7, [])


def test_newer_handles_void_the_older(shared, source):
    old = shared.handles()
    source.put(GIVEN | {"b": tiny.Raw("float32", (2,), bytes(8))})
    new = shared.handles()
    assert read(new)["b"] == ("float32", (2,), bytes(8))
    with pytest.raises(CorruptionError, match=r"'b' in shared memory.*newest handles") as caught:
        read(old)
    assert caught.value.tensors == ("b",)


def test_what_was_closed_is_gone(shared):
    handles = shared.handles()
    shared.close()
    shared.close()
    with pytest.raises(TransportError, match="the trainer is gone or has closed it"):
        read(handles)
    with pytest.raises(TransportError, match="call share_weights again"):
        shared.handles()


def test_a_module_is_shared_with_its_ties():
    pytest.importorskip("parallelkit_torch")
    model = torch.nn.ModuleDict({"x": torch.nn.Linear(3, 2), "y": torch.nn.Linear(3, 2)})
    model["y"].weight = model["x"].weight
    with share_weights(model) as shared:
        (table,) = shared.handles().values()
        assert set(table) == {"x.weight", "x.bias", "y.weight", "y.bias"}
        assert table["x.weight"] == table["y.weight"]
        with torch.no_grad():
            model["y"].weight.fill_(2.5)
        (newer,) = shared.handles().values()
        with Reader() as reader:
            assert reader.read(*parse("x.weight", newer["x.weight"])).eq(2.5).all()


def test_what_no_plugin_knows_is_refused():
    with pytest.raises(NoBackendError, match="reads weights from a builtins.dict"):
        share_weights({"a": 1})


@pytest.fixture
def handle(shared):
    return shared.handles()[device_id()]["b"]


@pytest.mark.parametrize(
    "given",
    [
        None,
        "a",
        ["rebuild_tensor", ()],
        (print, ("a call that torch.multiprocessing would make",)),
        {},
        {"segment": "/proc/1/fd/1"},
    ],
)
def test_other_handles_are_refused(given):
    with pytest.raises(ManifestError, match=r"'w' is none of parallelkit_vllm.share_weights"):
        parse("w", given)


@pytest.mark.parametrize(
    "change",
    [
        {"more": 1},
        {"shape": "2"},
        {"shape": [2.0]},
        {"inode": "1"},
        {"digest": None},
        {"segment": "/etc/passwd"},
        {"segment": "/proc/self/fd/3"},
        {"segment": "/proc/1/fd/../../../etc/passwd"},
        {"segment": "/proc/1/fd/3\n"},
        {"segment": "/dev/shm/other"},
        {"segment": "/dev/shm/parallelkit-/../x"},
        {"offset": -1},
        {"dtype": "object"},
        {"dtype": "system"},
        {"shape": [-2]},
    ],
)
def test_a_handle_that_was_altered_is_refused(handle, change):
    with pytest.raises(ManifestError):
        parse("w", handle | change)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"offset": 1 << 40}, TransportError, "ends at byte"),
        ({"offset": 0}, CorruptionError, "are others than"),
        ({"shape": [1]}, CorruptionError, "are others than"),
        ({"inode": 1}, TransportError, "another file than when"),
        ({"segment": "/proc/4194303999/fd/3"}, TransportError, "cannot be opened"),
        ({"segment": "/dev/shm/parallelkit-0-0"}, TransportError, "cannot be opened"),
    ],
)
def test_a_handle_that_leads_elsewhere_is_refused(handle, change, error, said):
    with Reader() as reader, pytest.raises(error, match=said):
        reader.read(*parse("w", handle | change))


def test_a_file_that_is_no_segment_is_refused(handle, tmp_path):
    """Nor does a pipe under that path make the reader wait."""
    plain = (tmp_path / "plain").open("w+b")
    plain.truncate(1 << 16)
    ends = os.pipe()
    try:
        for fd in (plain.fileno(), ends[0]):
            path = {"segment": f"/proc/{os.getpid()}/fd/{fd}", "inode": os.fstat(fd).st_ino}
            with Reader() as reader, pytest.raises(TransportError, match="is refused"):
                reader.read(*parse("w", handle | path))
    finally:
        plain.close()
        for fd in ends:
            os.close(fd)


def test_a_link_is_not_followed(handle):
    path = Path("/dev/shm/parallelkit-0-0-0-0-aa")
    path.symlink_to("/etc/passwd")
    try:
        with Reader() as reader, pytest.raises(TransportError, match="cannot be opened"):
            reader.read(*parse("w", handle | {"segment": str(path)}))
    finally:
        path.unlink()


def test_the_device_is_this_hosts_memory():
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert sharing.device_id() == f"cpu:{boot}"
