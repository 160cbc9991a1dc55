"""Folders of checkpoints: swaps, leftovers, damage, hostile bytes, documents."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xxhash
from parallelkit_torch.parallel import checkpoint_format as formats
from torch import nn

from parallelkit import checkpoint_files as files
from parallelkit.errors import CheckpointError


def net(fill: float = 0.0, hidden: int = 4) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, hidden), nn.Linear(hidden, 2))
    for parameter in model.parameters():
        nn.init.constant_(parameter, fill)
    return model


def filled(model: nn.Module) -> float:
    """The one value that all parameters have."""
    found = torch.cat([p.detach().flatten() for p in model.parameters()]).unique()
    assert found.numel() == 1
    return float(found)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- paths


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (3, "path is a int"),
        ("", "folder of its own"),
        ("/", "folder of its own"),
        (b"x", "path is a bytes"),
        ("s3://bucket/x", "file system that all ranks share"),
        ("a\0b", "file system"),
    ],
)
def test_paths_that_are_none(save: Any, load: Any, path: Any, said: str) -> None:
    for call in (lambda: save(path, net()), lambda: load(path, net())):
        with pytest.raises(CheckpointError, match=said):
            call()


def test_parents_are_made_and_relative_paths_work(
    save: Any, load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save("a/b/c/", net(2.0))
    load(tmp_path / "a" / "b" / "c", model := net())
    assert filled(model) == 2.0


def test_a_parent_that_is_a_file_is_an_error(save: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save(tmp_path / "file" / "c", net())


def test_what_is_no_checkpoint_is_never_replaced(save: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("x")
    (tmp_path / "link").symlink_to("home")
    (tmp_path / "broken").symlink_to("nowhere")
    before = names(tmp_path)
    for name in before:
        with pytest.raises(CheckpointError, match="exists; give overwrite=True"):
            save(tmp_path / name, net())
        with pytest.raises(CheckpointError, match="does not replace it"):
            save(tmp_path / name, net(), overwrite=True)
    assert names(tmp_path) == before
    assert (tmp_path / "home" / "letter").read_text() == "x"


def test_an_empty_folder_may_be_replaced(save: Any, load: Any, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    save(tmp_path / "c", net(2.0), overwrite=True)
    load(tmp_path / "c", model := net())
    assert filled(model) == 2.0


# --- swaps, and what crashes leave


def test_overwrite_replaces_all_of_it(save: Any, load: Any, tmp_path: Path) -> None:
    save(tmp_path / "c", net(1.0), extra={"n": 1})
    with pytest.raises(CheckpointError, match="exists; give overwrite=True"):
        save(tmp_path / "c", net(2.0))
    save(tmp_path / "c", net(2.0), extra={"n": 2}, overwrite=True)
    assert load(tmp_path / "c", model := net()) == {"n": 2}
    assert filled(model) == 2.0
    assert names(tmp_path) == ["c"]


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_rename_that_fails_leaves_the_old_one(
    save: Any, load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    save(tmp_path / "c", net(1.0))
    rename, calls = Path.rename, []

    def failing(self: Path, to: Path) -> Path:
        if self.name != ".metadata.tmp":  # of torch's own file
            calls.append(self.name)
            if len(calls) == fails_at:
                raise OSError(5, "Input/output error")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(tmp_path / "c", net(2.0), overwrite=True)
    assert len(calls) >= fails_at
    monkeypatch.undo()
    load(tmp_path / "c", model := net())
    assert filled(model) == 1.0
    assert names(tmp_path) == ["c"]


def test_an_end_between_the_two_renames_loses_nothing(save: Any, load: Any, tmp_path: Path) -> None:
    save(tmp_path / "c", net(1.0))
    (tmp_path / "c").rename(tmp_path / ".c.replaced")  # as far as the process came
    load(tmp_path / "c", model := net())
    assert filled(model) == 1.0
    with pytest.raises(CheckpointError, match="exists"):
        save(tmp_path / "c", net(2.0))
    assert names(tmp_path) == ["c"], "put back"
    shutil.copytree(tmp_path / "c", tmp_path / ".c.replaced")  # came one step further
    load(tmp_path / "c", net())
    save(tmp_path / "c", net(3.0), overwrite=True)
    assert names(tmp_path) == ["c"]
    load(tmp_path / "c", model)
    assert filled(model) == 3.0


def test_leftovers_go_and_a_save_in_progress_is_left_alone(
    save: Any, load: Any, tmp_path: Path
) -> None:
    (tmp_path / ".c.saving-0123abcd").mkdir()
    (tmp_path / ".c.saving-0123abcd" / "__0_0.distcp").write_text("half")
    (tmp_path / ".d.saving-0123abcd").mkdir()
    with pytest.raises(CheckpointError, match="does not exist"):
        load(tmp_path / "c", net())
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        load(tmp_path / ".c.saving-0123abcd", net())
    save(tmp_path / "c", net(1.0))
    assert names(tmp_path) == [".d.saving-0123abcd", "c"], "another checkpoint's is not ours"
    other = files.Saving(tmp_path / "c", overwrite=True)
    with pytest.raises(CheckpointError, match="another process is saving"):
        save(tmp_path / "c", net(2.0), overwrite=True)
    assert other.folder.is_dir()
    other.close()
    save(tmp_path / "c", net(2.0), overwrite=True)


def test_a_folder_that_does_not_appear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_APPEARS", 0.0)
    with pytest.raises(CheckpointError, match="all ranks share"):
        files.wait_for(tmp_path / "x")
    files.wait_for(tmp_path)


def test_a_failed_write_leaves_nothing(
    save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save(tmp_path / "c", net())
    assert names(tmp_path) == []


# --- damage and malice: every one is an error, and the model stays as it was


def _about(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        about = json.loads((folder / formats.ABOUT).read_text())
        change(about)
        (folder / formats.ABOUT).write_text(json.dumps(about))

    return edit


def _index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change the index, and what the other document says of it."""

    def edit(folder: Path) -> None:
        index = json.loads((folder / formats.INDEX).read_text())
        change(index)
        data = json.dumps(index).encode()
        (folder / formats.INDEX).write_bytes(data)
        _about(lambda about: about.update(index=formats.digest(data)))(folder)

    return edit


def _chunk(position: int, value: Any) -> Callable[[Path], None]:
    def change(index: dict[str, Any]) -> None:
        index["model"]["0.weight"][2][0][position] = value

    return _index(change)


def _cut(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def _flip(folder: Path) -> None:
    index = json.loads((folder / formats.INDEX).read_text())
    _, _, name, start, length, _ = index["model"]["1.bias"][2][0]
    with (folder / name).open("r+b") as file:
        file.seek(start + length // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "does not exist"),
    "no about": (lambda f: (f / formats.ABOUT).unlink(), "no complete checkpoint"),
    "no index": (lambda f: (f / formats.INDEX).unlink(), "no complete checkpoint"),
    "half about": (_cut(formats.ABOUT), "is damaged"),
    "half index": (_cut(formats.INDEX), "is damaged"),
    "about is a list": (lambda f: (f / formats.ABOUT).write_text("[]"), "format None"),
    "about is bytes": (lambda f: (f / formats.ABOUT).write_bytes(b"\xff\0"), "is damaged"),
    "deep": (lambda f: (f / formats.ABOUT).write_text("[" * 100_000), "is damaged"),
    "new format": (_about(lambda a: a.update(format=2)), "format 2; .* reads 1"),
    "unknown field": (_about(lambda a: a.update(more=1)), "unknown field"),
    "wrong type": (_about(lambda a: a.update(files=[])), "is damaged"),
    "file missing": (lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "file cut": (_cut("__0_0.distcp"), "__0_0.distcp has"),
    "file changed": (_flip, "not those that were written"),
    "outside": (_about(lambda a: a["files"].update({"../../etc/passwd": 1})), "no plain file name"),
    "other file": (_chunk(2, "../c/__0_0.distcp"), "impossible region"),
    "beyond the file": (_chunk(3, 1 << 40), "impossible region"),
    "before the file": (_chunk(3, -1), "impossible region"),
    "no bytes": (_chunk(4, 0), "impossible region"),
    "beyond the tensor": (_chunk(0, [1, 0]), "impossible region"),
    "other dims": (_chunk(1, [12]), "impossible region"),
    "part of the tensor": (_chunk(1, [2, 3]), "6 of 12 elements"),
    "other digest": (_chunk(5, 1), "not those that were written"),
    "other bytes": (_chunk(3, 1), "not those that were written"),
    "no regions": (_index(lambda i: i["model"]["0.weight"].__setitem__(2, [])), "0 of 12"),
    "negative shape": (
        _index(lambda i: i["model"]["0.weight"].__setitem__(1, [-4, -3])),
        "damaged",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_before_anything_is_loaded(
    save: Any, load: Any, tmp_path: Path, name: str
) -> None:
    damage, said = DAMAGE[name]
    save(tmp_path / "c", net(1.0))
    damage(tmp_path / "c")
    model = net(7.0)
    with pytest.raises(CheckpointError, match=said):
        load(tmp_path / "c", model)
    assert filled(model) == 7.0


def test_a_checkpoint_of_another_tool_is_told_from_ours(load: Any, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".metadata").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="no complete checkpoint of parallelkit"):
        load(tmp_path / "c", net())


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_a_load_unpickles_nothing(save: Any, load: Any, tmp_path: Path) -> None:
    """Hostile bytes in torch's pickle, and in a tensor's place with a digest that fits."""
    save(tmp_path / "c", net(1.0))
    trap, buffer = tmp_path / "trap", io.BytesIO()
    torch.save(Hostile(trap), buffer)
    data = buffer.getvalue()
    torch.load(io.BytesIO(data), weights_only=False)
    assert trap.exists(), "the trap works"
    trap.unlink()
    (tmp_path / "c" / ".metadata").write_bytes(data)
    load(tmp_path / "c", model := net())
    assert filled(model) == 1.0, "torch's own file is not read"

    def change(index: dict[str, Any]) -> None:
        where = [0, len(data), xxhash.xxh3_64_intdigest(data)]
        index["model"]["0.weight"][2][0][2:] = ["hostile", *where]

    (tmp_path / "c" / "hostile").write_bytes(data)
    _about(lambda about: about["files"].update(hostile=len(data)))(tmp_path / "c")
    _index(change)(tmp_path / "c")
    with pytest.raises(CheckpointError, match="UnpicklingError"):
        load(tmp_path / "c", model := net(7.0))
    assert filled(model) == 7.0
    assert not trap.exists()


# --- documents


def test_documents_are_read_as_they_were_written(save: Any, tmp_path: Path) -> None:
    model = net(1.0)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save(tmp_path / "c", model, optimizer, extra={"step": 3})
    about, index, mark = formats.read(tmp_path / "c")
    assert (about.format, about.framework, about.world_size) == (1, "torch", 1)
    assert about.degrees["data_shard"] == 1
    assert about.versions["torch"] == str(torch.__version__)
    assert about.extra == {"step": 3}
    assert about.optimizer is not None
    assert about.optimizer.groups[0].names == list(dict(model.named_parameters()))
    assert set(index.optimizer["0.bias"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert index.model["0.weight"].shape == (4, 3)
    assert formats.digest((tmp_path / "c" / formats.ABOUT).read_bytes()) == mark
    again = msgspec.convert(json.loads(formats.encode_about(about)), formats.About)
    assert again == about
