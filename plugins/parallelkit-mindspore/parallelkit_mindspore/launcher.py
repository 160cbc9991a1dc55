"""msrun's command line, for `parallelkit run --framework mindspore`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from parallelkit.errors import LaunchError
from parallelkit.meeting import bind
from parallelkit.specs import LaunchSpec


def command(spec: LaunchSpec) -> list[str]:
    """Return msrun's command line for ranks of this host; it waits and shows their output.

    msrun runs `python` from PATH, so PATH begins with the folder of the interpreter asked for.
    Logs go to a new folder of the temporary folder, which msrun names; it is removed if every rank
    ends well.

    Raises:
        LaunchError: that folder has no `python`.
    """
    folder = Path(spec.python).absolute().parent
    if not (folder / "python").exists():
        raise LaunchError(
            f"msrun starts ranks with a command named python, and {folder}, where {spec.python} "
            "is, has none; run parallelkit from a virtual environment"
        )
    with bind("127.0.0.1") as free:
        port = free.getsockname()[1]
    logs = Path(tempfile.gettempdir(), f"parallelkit-msrun-{os.getpid()}-{port}")
    return [
        "env",
        f"PATH={folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        spec.python,
        "-m",
        "parallelkit_mindspore.msrun",
        f"--worker_num={spec.ranks}",
        f"--local_worker_num={spec.ranks}",
        f"--master_port={port}",
        f"--log_dir={logs}",
        "--join=True",
        spec.script,
        *spec.args,
    ]
