"""Starting llama-server: options and a launch in, a running child out."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
from pathlib import Path
from typing import IO

from pyspac.engine.attached import not_by_environment
from pyspac.engine.cpus import kept_within
from pyspac.engine.values import check_variable, read_cpu_range
from pyspac.errors import PyspacError
from pyspac.openmp_spin import spin_environment
from pyspac.server import board_file, log
from pyspac.server.arguments import Launch, server_argv, server_env
from pyspac.server.child import Child
from pyspac.server.keep import keep_env
from pyspac.server.options import ServeOptions


def start_server(
    options: ServeOptions,
    launch: Launch,
    output: IO[bytes] | None = None,
    death_signal: signal.Signals = signal.SIGTERM,
) -> Child:
    """llama-server, on its cores and with its environment; `output` takes its log instead of stderr.

    `death_signal`: what it gets when this process is gone.

    Raises PyspacError if the program is missing.
    """
    from pyspac._native import bin_dir  # finds the build; loads the small native module only

    argv = server_argv(options, launch, bin_dir())
    if not Path(argv[0]).is_file():
        raise PyspacError(f"{argv[0]} is missing; run `make build` (or `pip install .`) again")
    board_file.remove_stale(launch.board)
    log.event(f"starting {shlex.join(argv)}", argv=argv)
    with _on_its_cores(options.cpu_range), not_by_environment():
        env = spin_environment() | server_env(options, launch.ram_bytes)
        its = {name: value for name, value in (os.environ | env).items() if value is not None}
        check_variables(its, options)
        env |= keep_env(options.keep, options.keep_mib, argv, its, launch.model, launch.n_ctx)
        return Child("llama-server", argv, env=env, stdout=output, stderr=output, death_signal=death_signal)


def check_variables(env: dict[str, str], options: ServeOptions) -> None:
    """Raise UsageError, before anything is loaded, for a value that the engine will refuse."""
    for name, value in {} if options.stock else env.items():
        if name.startswith("PYSPAC_") and value:
            check_variable(name, value)


def _on_its_cores(cpu_range: str | None) -> contextlib.AbstractContextManager[None]:
    """What starts meanwhile stays on --cpu-range."""
    return contextlib.nullcontext() if cpu_range is None else kept_within(read_cpu_range(cpu_range))
