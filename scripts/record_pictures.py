"""Records docs/chat.svg and docs/top.svg from real runs of the demo: `python scripts/record_pictures.py`.

In: nothing. Out: both pictures, in docs/ or in --output FOLDER. A chat reads its questions from a pipe, so
the picture shows them where a terminal would; everything else is what the command printed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from rich.console import Console  # noqa: E402
from rich.text import Text  # noqa: E402

from tools.served import TARGET, Serve, complete, environment, run_pyspac  # noqa: E402

WIDTH: Final = 88
QUESTIONS: Final = ("def parse(self, text):", "class Reader:", "/stats")
CHAT: Final = ("chat", str(TARGET), "--temp", "0", "-n", "40")
TIMEOUT_S: Final = 120.0
FONTS: Final = re.compile(r"@font-face *\{[^}]*\}")  # from the network; the viewer has its own


def record_chat(path: Path, folder: Path) -> None:
    """One chat for all questions; an answer ends where the next one's mark is."""
    done = subprocess.run(
        [sys.executable, "-m", "pyspac", *CHAT],
        input="\n".join(QUESTIONS), env=environment(folder), capture_output=True, text=True,
        timeout=TIMEOUT_S, check=True,
    )  # fmt: skip
    answers = done.stdout.split("[-n tokens are reached]\n")
    console = Console(record=True, width=WIDTH, file=(folder / "shown").open("w"), highlight=False)
    console.print(Text(f"$ pyspac chat {TARGET.name} --temp 0 -n 40", style="bold"))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        console.print(Text(f"> {question}", style="cyan"))
        console.print(Text(answer.rstrip("\n")))
        if not question.startswith("/"):
            console.print(Text("[-n tokens are reached]", style="dim"))
    svg = console.export_svg(title="pyspac chat", unique_id="chat")
    path.write_text(FONTS.sub("", svg), encoding="utf-8")


def record_top(path: Path, folder: Path, seconds: float) -> None:
    """A server with two clients that ask without pause."""
    with Serve(folder, "--draft-max", "4") as serve:
        serve.wait_ready()
        with asking(serve.port), asking(serve.port):
            done = run_pyspac(
                "top", serve.board, "--svg", str(path), "--seconds", str(seconds), cache_dir=folder
            )
    if done.returncode:
        raise SystemExit(done.stderr)


@contextmanager
def asking(port: int) -> Iterator[None]:
    """Somebody who asks inside the block."""
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            complete(port, 64)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs", metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long `pyspac top` watches")
    given = parser.parse_args()
    chat, top = (given.output / f"{name}.svg" for name in ("chat", "top"))
    with tempfile.TemporaryDirectory() as folder:
        record_chat(chat, Path(folder))
        record_top(top, Path(folder), given.seconds)
    print(chat, top)


if __name__ == "__main__":
    main()
