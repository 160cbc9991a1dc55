"""`python -m parallelkit_mindspore.msrun`: msrun, and its logs are removed if all ranks succeed."""

from __future__ import annotations

import shutil

from mindspore.parallel.cluster import run


def main() -> None:
    """Run msrun in this process by its own command line, which has `--log_dir`.

    Where a rank or the scheduler fails, msrun raises an error that names the folder of logs, which
    stays; so it does after Ctrl-C, at which msrun ends the process.
    """
    logs = run.get_args().log_dir
    run.main()
    shutil.rmtree(logs, ignore_errors=True)


if __name__ == "__main__":
    main()
