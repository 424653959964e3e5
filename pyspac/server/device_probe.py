"""What devices there are, asked in a process of its own.

A process that has asked a GPU holds memory of it until it ends, and the supervisor lives long. And llama.cpp
waits for an RPC server without end: that process can be ended.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Final

from pyspac._native import bin_dir
from pyspac.engine.devices import Device, choose_device, cpu_device
from pyspac.engine.rpc import NoAnswerError
from pyspac.engine.values import read_device_kind
from pyspac.errors import ConfigError, PyspacError, UsageError
from pyspac.server.child import Finished, run_to_end
from pyspac.server.download import StoppedError

_GPU_TIMEOUT_S: Final = 120.0  # drivers of several GPUs take up to a minute to come up
_RPC_TIMEOUT_S: Final = 30.0  # 10 for the first greeting that fails (pyspac.engine.rpc); then round trips
_OF_THE_HOST: Final = ("libggml-base", "libggml-cpu", "libggml-rpc")
_STOCK: Final = "stock"
_EXIT_NO_ANSWER: Final = 3  # of the probe


def probe_device(
    names: str, rpc: str | None, is_stopped: Callable[[], bool], *, is_split: bool = True
) -> Device:
    """The device and its free memory.

    Raises ConfigError if there is no such device, NoAnswerError if there is no such server or it does not
    answer, StoppedError if `is_stopped` says so.
    """
    match read_device_kind(names):
        case "none":
            return cpu_device(has_cache=False)
        case "emulated":
            return cpu_device()
        case "auto" if rpc is None and not _may_have_gpu():
            return cpu_device(has_cache=False)
    argv = [sys.executable, "-m", __name__, names, rpc or "", *([] if is_split else [_STOCK])]
    done = _run(argv, rpc, is_stopped)
    if done.exit_code == _EXIT_NO_ANSWER:
        raise NoAnswerError(done.stdout.strip())
    if done.exit_code == ConfigError.exit_code:
        raise UsageError(done.stdout.strip())
    if done.exit_code != 0:
        raise PyspacError(f"the devices could not be listed: {done.stderr.strip()[-500:]}")
    fields = json.loads(done.stdout)
    return Device(**fields | {"parts": tuple(Device(**part) for part in fields["parts"])})


def _may_have_gpu() -> bool:
    """Whether this build has a backend of a device, or is pointed at one; asking it takes half a second."""
    libraries = {path.name.split(".")[0] for path in bin_dir().glob("libggml*")}
    return "GGML_BACKEND_PATH" in os.environ or any(
        not name.startswith(_OF_THE_HOST) and name != "libggml" for name in libraries
    )


def _run(argv: list[str], rpc: str | None, is_stopped: Callable[[], bool]) -> Finished:
    timeout_s = _GPU_TIMEOUT_S if rpc is None else _RPC_TIMEOUT_S

    def check() -> None:
        if is_stopped():
            raise StoppedError("the devices were not listed: stopped")

    try:
        return run_to_end("device probe", argv, on_tick=check, timeout_s=timeout_s)
    except TimeoutError:
        raise _too_late(rpc, timeout_s) from None


def _too_late(rpc: str | None, timeout_s: float) -> PyspacError:
    if rpc is None:
        return PyspacError(
            f"the devices did not answer for {timeout_s:.0f} s: see whether the GPU's own tools do, or give "
            "--device none"
        )
    return NoAnswerError(
        f"one of the RPC servers {rpc} has answered the greeting and then nothing for {timeout_s:.0f} s: "
        "start it again, or leave it out of --rpc (ask them one by one with pyspac doctor --rpc)"
    )


def _answer(names: str, rpc: str = "", way: str = "") -> int:
    try:
        print(json.dumps(asdict(choose_device(names, rpc or None, is_split=way != _STOCK))))
    except NoAnswerError as error:
        print(error)
        return _EXIT_NO_ANSWER
    except ConfigError as error:
        print(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_answer(*sys.argv[1:]))
