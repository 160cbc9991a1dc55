"""Segments: what a subscriber may do with one, what is refused, and that nothing is left."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import mmap
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from parallelkit.errors import TransportError
from parallelkit.weights import segments
from parallelkit.weights.identity import host_identity, start_time
from parallelkit.weights.segments import (
    HEADER_BYTES,
    MAGIC,
    SHM_DIR,
    Segment,
    list_orphans,
    sweep_orphans,
)

SIZE = 10_000
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | 0x10


def open_fds():
    return {fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}


@pytest.fixture(autouse=True)
def _no_descriptor_and_no_name_is_left():
    before, names = open_fds(), set(SHM_DIR.iterdir())
    yield
    if open_fds() - before:
        gc.collect()  # views that outlive their segment hold its descriptor
    assert open_fds() <= before  # what an earlier test left to the collector may have gone
    assert {p for p in set(SHM_DIR.iterdir()) - names if p.name.startswith("parallelkit")} == set()


@pytest.fixture
def made():
    with contextlib.closing(Segment.create(SIZE)) as segment:
        yield segment


@pytest.fixture
def attached(made):
    with contextlib.closing(Segment.attach(os.dup(made.fd), SIZE)) as segment:
        yield segment


@pytest.fixture
def named():
    with contextlib.closing(Segment.create(SIZE, named=True)) as segment:
        yield segment


def memfd(size, content=MAGIC, seals=SEALS):
    """An anonymous file of any content and seals, as a stranger might hand over."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    os.pwrite(fd, content, 0)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


# --- what works --------------------------------------------------------------------------------


def test_a_segment_starts_zeroed_and_both_ends_see_the_same(made, attached):
    assert made.nbytes == attached.nbytes == len(made.arena) == len(attached.arena) == SIZE
    assert not any(made.arena)
    assert made.epoch == attached.epoch == 0
    made.arena[:3] = b"abc"
    made.arena[-1] = 7
    made.epoch = 2**40
    assert bytes(attached.arena[:4]) == b"abc\0"
    assert attached.arena[-1] == 7
    assert attached.epoch == 2**40


def test_the_arena_is_aligned_to_a_page(made):
    assert np.frombuffer(made.arena, np.uint8).ctypes.data % 4096 == 0


@pytest.mark.parametrize("nbytes", [1, 256, 4096, 1 << 20])
def test_sizes(nbytes):
    segment = Segment.create(nbytes)
    other = Segment.attach(os.dup(segment.fd), nbytes)
    assert len(other.arena) == nbytes
    other.close()
    segment.close()


def test_a_subscriber_outlives_the_publisher(made, attached):
    made.arena[0] = 42
    made.close()
    assert attached.arena[0] == 42


# --- what a subscriber may not -----------------------------------------------------------------


def test_the_attacher_cannot_write(attached):
    assert attached.arena.readonly
    with pytest.raises(TypeError, match="read-only"):
        attached.arena[0] = 1
    with pytest.raises(TypeError, match="read-only"):
        attached.epoch = 5
    array = np.frombuffer(attached.arena, np.uint8)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True
    del array


def test_the_attacher_cannot_map_for_writing_by_any_descriptor(made, attached):
    again = os.open(f"/proc/self/fd/{attached.fd}", os.O_RDWR)
    try:
        for fd in (attached.fd, again):
            with pytest.raises(PermissionError):
                mmap.mmap(fd, HEADER_BYTES + SIZE, flags=mmap.MAP_SHARED, prot=mmap.PROT_WRITE)
            with pytest.raises(PermissionError):
                os.pwrite(fd, b"x", HEADER_BYTES)
    finally:
        os.close(again)
    assert not any(made.arena)
    made.arena[0] = 1  # the publisher's own mapping is older than the seal


def test_nobody_can_resize_it_or_add_seals(made, attached):
    for size in (0, HEADER_BYTES + SIZE - 1, HEADER_BYTES + SIZE + 1):
        for fd in (made.fd, attached.fd):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(attached.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_nobody_can_punch_a_hole_in_it(made, attached):
    libc = ctypes.CDLL(None, use_errno=True)
    keep_size_and_punch, start, length = 0x03, ctypes.c_int64(HEADER_BYTES), ctypes.c_int64(4096)
    assert libc.fallocate(attached.fd, keep_size_and_punch, start, length) == -1
    assert ctypes.get_errno() == errno.EPERM


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [16, HEADER_BYTES, HEADER_BYTES + SIZE - 1, HEADER_BYTES + 2**40])
def test_another_size_is_refused(size):
    with pytest.raises(TransportError, match=f"refused: it has {size} bytes instead of"):
        Segment.attach(memfd(size), SIZE)


@pytest.mark.parametrize("content", [b"", b"parallelkit:2\0\0\0", b"\x7fELF", bytes(16)])
def test_another_header_is_refused(content):
    with pytest.raises(TransportError, match="refused: it has no parallelkit header"):
        Segment.attach(memfd(HEADER_BYTES + SIZE, content), SIZE)


@pytest.mark.parametrize("missing", [0x01, 0x02, 0x04, 0x10, SEALS])
def test_a_seal_that_is_missing_is_refused(missing):
    with pytest.raises(TransportError, match="refused: it is not sealed"):
        Segment.attach(memfd(HEADER_BYTES + SIZE, seals=SEALS & ~missing), SIZE)


@pytest.mark.parametrize("folder", ["/dev/shm", None])
def test_an_unlinked_file_is_refused_wherever_it_was(folder):
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(MAGIC.ljust(HEADER_BYTES + SIZE, b"\0"))
        file.flush()
        assert os.fstat(file.fileno()).st_nlink == 0
        with pytest.raises(TransportError, match="refused: it is not sealed"):
            Segment.attach(os.dup(file.fileno()), SIZE)


def test_a_filesystem_without_seals_is_refused(monkeypatch):
    def no_seals(fd, command, *args):
        raise OSError(errno.EINVAL, "Invalid argument")

    fd = memfd(HEADER_BYTES + SIZE)
    monkeypatch.setattr(segments.fcntl, "fcntl", no_seals)
    with pytest.raises(TransportError, match="refused: it is not sealed"):
        Segment.attach(fd, SIZE)


def test_what_is_no_file_is_refused():
    read, write = os.pipe()
    os.close(write)
    with pytest.raises(TransportError, match="refused: it has 0 bytes"):
        Segment.attach(read, SIZE)
    with pytest.raises(TransportError, match="refused"):
        Segment.attach(os.open("/dev/zero", os.O_RDONLY), SIZE)
    with pytest.raises(TransportError, match="refused"):
        Segment.attach(os.open("/dev/shm", os.O_RDONLY), SIZE)


def test_another_user_s_segment_is_refused(monkeypatch):
    fd = memfd(HEADER_BYTES + SIZE)
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(TransportError, match=f"refused: it belongs to user {mine}"):
        Segment.attach(fd, SIZE)


# --- when there is no memory -------------------------------------------------------------------


@pytest.mark.parametrize("named", [False, True])
def test_a_file_that_may_not_grow_so_large(named):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(TransportError, match="cannot allocate a shared segment of 2097152"):
            Segment.create(2 << 20, named=named)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("nbytes", [1 << 50, 1 << 62, 1 << 80])
def test_more_than_the_machine_has_is_refused_before_it_is_taken(nbytes, named):
    with pytest.raises(TransportError, match=f"shared segment of {nbytes} bytes"):
        Segment.create(nbytes, named=named)


@pytest.mark.parametrize("named", [False, True])
def test_a_map_that_fails(monkeypatch, named):
    def full(*args, **kwargs):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(segments.mmap, "mmap", full)
    with pytest.raises(TransportError, match="is there enough memory"):
        Segment.create(SIZE, named=named)
    with pytest.raises(TransportError, match="is there enough memory"):
        Segment.attach(memfd(HEADER_BYTES + SIZE), SIZE)


# --- close -------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["made", "attached"])
def test_close_with_views_alive(request, made, end):
    segment = request.getfixturevalue(end)
    made.arena[:4] = b"live"
    view, array = segment.arena, np.frombuffer(segment.arena, np.uint8)
    segment.close()
    segment.close()
    assert bytes(view[:4]) == b"live"
    assert array[:4].tobytes() == b"live"
    assert segment.fd == -1
    if end == "made":
        array[0] = 0
        assert view[0] == 0


def test_close_without_views_unmaps():
    gc.collect()  # segments that earlier tests left behind
    mapped = Path("/proc/self/maps").read_text().count("parallelkit")
    segment = Segment.create(1 << 20)
    assert Path("/proc/self/maps").read_text().count("parallelkit") > mapped
    segment.close()
    assert Path("/proc/self/maps").read_text().count("parallelkit") == mapped
    segment.close()
    with pytest.raises(ValueError, match="released"):
        _ = segment.arena


def test_the_descriptor_does_not_reach_programs_that_are_started(made):
    assert not os.get_inheritable(made.fd)


# --- names -------------------------------------------------------------------------------------


def test_a_named_segment_is_the_user_s_alone_and_goes_with_close(named):
    path = named.path
    assert path.parent == SHM_DIR
    facts = path.stat()
    assert facts.st_mode & 0o7777 == 0o600
    assert facts.st_uid == os.geteuid()
    other = Segment.attach(os.open(path, os.O_RDONLY), SIZE, sealed=False)
    named.arena[5] = 9
    assert other.arena[5] == 9
    named.close()
    assert not path.exists()
    assert other.arena[5] == 9
    other.close()


def test_the_mode_does_not_depend_on_the_umask():
    before = os.umask(0)
    try:
        with contextlib.closing(Segment.create(SIZE, named=True)) as segment:
            assert segment.path.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


def test_an_anonymous_segment_has_no_name(made):
    assert made.path is None
    assert os.fstat(made.fd).st_nlink == 0


def test_a_living_process_s_segment_is_no_orphan(named):
    assert named.path not in {o.path for o in list_orphans()}
    assert named.path not in {o.path for o in sweep_orphans()}
    assert named.path.exists()


def test_close_is_fine_when_the_name_is_gone_already(named):
    named.path.unlink()
    named.close()


def orphan_name(pid=2**22 + 1, started=5, uid=None, namespace=None, tail="0" * 16):
    """The name of a segment whose process cannot exist."""
    uid = os.geteuid() if uid is None else uid
    namespace = host_identity().pid_namespace if namespace is None else namespace
    return f"parallelkit-{uid}-{pid}-{started}-{namespace}-{tail}"


def test_a_name_says_who_made_it(named):
    me = os.getpid()
    assert named.path.name.startswith(orphan_name(me, start_time(me), tail=""))


def test_an_orphan_is_listed_then_swept(tmp_path):
    path = tmp_path / orphan_name()
    path.write_bytes(b"12345")
    (orphan,) = list_orphans(tmp_path)
    assert (orphan.path, orphan.nbytes) == (path, 5)
    assert "is gone" in orphan.reason
    assert path.exists(), "listing removes nothing"
    assert sweep_orphans(tmp_path) == [orphan]
    assert list(tmp_path.iterdir()) == []
    assert sweep_orphans(tmp_path) == []


def test_a_process_number_that_is_used_again_is_another_process(tmp_path):
    me = os.getpid()
    (tmp_path / orphan_name(me, start_time(me), tail="a" * 16)).touch()
    reused = tmp_path / orphan_name(me, start_time(me) + 1, tail="b" * 16)
    reused.touch()
    assert [o.path for o in list_orphans(tmp_path)] == [reused]


@pytest.mark.parametrize(
    "name",
    [
        "parallelkit",
        "parallelkit-",
        "parallelkit-torch.lock",
        "other-0-1-2-3-" + "0" * 16,
        orphan_name(tail="0" * 15),
        orphan_name(tail="0" * 17),
        orphan_name(tail="g" * 16),
        orphan_name() + ".tmp",
        orphan_name(pid=-1),
        orphan_name(pid="x"),
    ],
)
def test_foreign_names_are_left_alone(tmp_path, name):
    (tmp_path / name).touch()
    assert sweep_orphans(tmp_path) == []
    assert (tmp_path / name).exists()


def test_another_user_s_and_another_namespace_s_names_are_left_alone(tmp_path):
    (tmp_path / orphan_name(uid=os.geteuid() + 1)).touch()
    (tmp_path / orphan_name(namespace=host_identity().pid_namespace + 1)).touch()
    assert sweep_orphans(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 2


def test_links_and_folders_are_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("keep")
    link, folder = tmp_path / orphan_name(), tmp_path / orphan_name(tail="f" * 16)
    link.symlink_to(precious)
    folder.mkdir()
    (tmp_path / orphan_name(tail="d" * 16)).symlink_to(tmp_path / "nowhere")
    assert sweep_orphans(tmp_path) == []
    assert precious.read_text() == "keep"
    assert link.is_symlink()
    assert folder.is_dir()


# --- processes that are killed -----------------------------------------------------------------

CHILD = """
import sys
from parallelkit.weights.segments import Segment
segment = Segment.create({size}, named={named})
segment.arena[0] = 1
print(segment.path, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def child(named):
    code = CHILD.format(size=SIZE, named=named)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.ranks
def test_a_killed_process_s_named_segment_is_swept():
    with child(named=True) as (process, text):
        path = Path(text)
        assert path.exists()
        assert path not in {o.path for o in list_orphans()}, "it lives"
        process.send_signal(signal.SIGKILL)
        process.wait()
        (orphan,) = (o for o in list_orphans() if o.path == path)
        assert orphan.nbytes == HEADER_BYTES + SIZE
        assert str(process.pid) in orphan.reason
        assert orphan in sweep_orphans()
        assert not path.exists()


@pytest.mark.ranks
def test_a_killed_process_is_gone_even_before_it_is_waited_for():
    with child(named=True) as (process, text):
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert Path(text) in {o.path for o in sweep_orphans()}, "a zombie holds no memory"


@pytest.mark.ranks
def test_a_killed_process_s_anonymous_segment_leaves_nothing():
    before = set(SHM_DIR.iterdir())
    with child(named=False) as (process, text):
        assert text == "None"
        assert set(SHM_DIR.iterdir()) == before
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert set(SHM_DIR.iterdir()) == before
