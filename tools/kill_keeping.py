"""`kill -9` while llama-server keeps prompts: never a wrong text, never a broken file.

    python -m tools.kill_keeping --kills 200

Each time a server answers some prompts and is killed: at any moment, while it writes (a second after an
answer), or while it ends. The next one finds what is there; every text must be that of a server that keeps
nothing, and every file whose name says so must be whole.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from pyspac.server.health import is_healthy
from tools.served import HOST, ONE_THREAD, TARGET, free_port, post, wait_for

KEY: Final = "0123456789abcdef" * 4
KEEP_MIB: Final = 4  # a few prompts: some are thrown away
N_PREDICT: Final = 12
_TEXT: Final = (
    "def parse(self, text):\n    return [line.split() for line in text.splitlines() if line]\n" * 12
)
_OTHER: Final = (
    "import os\nimport sys\n\n\nclass Reader:\n    def read(self, path):\n        return path\n" * 12
)
PROMPTS: Final = (
    _TEXT, _OTHER, _TEXT + "\n\ndef main():\n", _OTHER + "\n\ndef main():\n", _OTHER + _TEXT, _TEXT + _OTHER
)  # fmt: skip


@contextmanager
def server(bin_dir: Path, folder: Path | None, log: Path) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """llama-server with two slots; its port and its process, which is killed in the end."""
    port = free_port()
    argv = [str(bin_dir / "llama-server"), "-m", str(TARGET), "--host", HOST, "--port", str(port)]
    keep = {} if folder is None else {
        "PYSPAC_KEEP": str(folder), "PYSPAC_KEEP_MIB": str(KEEP_MIB), "PYSPAC_KEEP_KEY": KEY,
    }  # fmt: skip
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*argv, "-np", "2", "-c", "4096", "--no-warmup", "--device", "none", *ONE_THREAD],
            env={**os.environ, **keep}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        wait_for("llama-server", lambda: is_healthy(HOST, port) or process.poll() is not None)
        yield port, process
    finally:
        process.kill()
        process.wait()


def ask(port: int, prompt: str) -> tuple[str, int]:
    """The text, and how many tokens of the prompt were there already."""
    body = {"prompt": prompt, "n_predict": N_PREDICT, "temperature": 0, "ignore_eos": True}
    answer: dict[str, Any] = post(port, "/completion", body)
    return str(answer["content"]), int(answer["timings"]["cache_n"])


def kill(process: subprocess.Popen[bytes], answers: list[Future[tuple[str, int]]], rng: random.Random) -> str:
    """At a moment of one kind, which is returned."""
    kind = rng.choice(("any time", "writing", "ending"))
    if kind == "any time":
        time.sleep(rng.uniform(0.0, 2.0))
    else:
        for answer in answers:
            answer.exception()
        time.sleep(rng.uniform(0.8, 2.2) if kind == "writing" else 0.0)
    if kind == "ending":
        process.send_signal(signal.SIGTERM)
        time.sleep(rng.uniform(0.0, 0.1))
    process.kill()
    return kind


def check_files(folder: Path) -> None:
    for path in folder.glob("*.prompt"):
        with contextlib.suppress(FileNotFoundError):
            data = path.read_bytes()
            assert int.from_bytes(data[24:32], "little") == len(data), f"{path} is not whole"
    total = sum(path.stat().st_size for path in folder.iterdir())
    assert total <= KEEP_MIB << 20, f"{total} bytes are kept, more than {KEEP_MIB} MiB"


def kill_at_random(bin_dir: Path, folder: Path, n_kills: int, seed: int = 0) -> Counter[str]:
    """How often at which moment, and how many answers went on from what was kept. AssertionError else."""
    rng, done, log = random.Random(seed), Counter[str](), folder / "server.log"
    kept = folder / "kept"
    kept.mkdir(mode=0o700)
    with server(bin_dir, None, log) as (port, _):
        wanted = {prompt: ask(port, prompt)[0] for prompt in PROMPTS}
    for _ in range(n_kills):
        with server(bin_dir, kept, log) as (port, process), ThreadPoolExecutor() as pool:
            prompts = rng.sample(PROMPTS, 2)
            answers = [pool.submit(ask, port, prompt) for prompt in prompts]
            done[kill(process, answers, rng)] += 1
            for prompt, answer in zip(prompts, answers, strict=True):
                with contextlib.suppress(OSError, ValueError):  # it was cut off
                    text, n_cached = answer.result()
                    assert text == wanted[prompt], f"another text after {done}: {text!r}"
                    done["answers"] += 1
                    done["restored"] += n_cached > 50
        check_files(kept)
    with server(bin_dir, kept, log) as (port, _):
        for prompt in PROMPTS:
            assert ask(port, prompt)[0] == wanted[prompt]
        assert not list(kept.glob("*.tmp"))
    return done


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    from pyspac._native import bin_dir

    with tempfile.TemporaryDirectory() as folder:
        try:
            done = kill_at_random(bin_dir(), Path(folder), args.kills, args.seed)
        except AssertionError as error:
            print(error, file=sys.stderr)
            return 1
    print(", ".join(f"{name}: {n}" for name, n in sorted(done.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
