"""What is there before the faults come: folders, adapters, plain llama-server's answers, the server."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspac._native import bin_dir
from tools.served import DRAFT, ONE_THREAD, Serve, llama_server
from tools.soak import namespace
from tools.soak.adapters import write_adapters
from tools.soak.asker import Asker
from tools.soak.questions import Answer, Question, all_questions
from tools.soak.references import find_references
from tools.system_faults import VARIABLE, SystemFaults, has_compiler, prepare

N_SLOTS: Final = 4
SHM_MIB: Final = 64
DISK_MIB: Final = 256
# of the server's heap: what is freed goes back at once, so that resident memory is memory in use. Else
# buffers that grow leave holes: plain llama-server's went from 70 to 75 MiB in five minutes, by way of 78
TIGHT_HEAP: Final = {
    "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536",
}  # fmt: skip


@dataclass(slots=True)
class Stage:
    """What is there before the server runs."""

    folder: Path
    shm: Path | None
    disk: Path | None
    adapters: list[Path]
    system: dict[str, str]  # environment of a server whose threads are to run out; {}: not here

    @property
    def cache_folder(self) -> Path:
        return self.folder / "cache"  # where `Serve` has pyspac keep what it learns

    @property
    def slots_folder(self) -> Path:
        return self.cache_folder / "slots"

    def system_faults(self) -> SystemFaults | None:
        return SystemFaults(Path(self.system[VARIABLE])) if self.system else None

    def adapter_arguments(self) -> list[str]:
        """For llama-server: both loaded, none on."""
        return ["--lora", ",".join(map(str, self.adapters)), "--lora-init-without-apply"]


@contextlib.contextmanager
def staged(model: Path, seed: int) -> Iterator[Stage]:
    """A folder, small file systems of our own where they are allowed, and the adapters."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pyspac-soak-")))
        (folder / "cache").mkdir()
        shm = stack.enter_context(namespace.mounted(namespace.SHM, SHM_MIB))
        disk = stack.enter_context(namespace.mounted(folder / "cache", DISK_MIB))
        system = prepare(folder) if has_compiler() else {}
        stage = Stage(folder, shm, disk, write_adapters(folder, model, seed), system)
        stage.slots_folder.mkdir()
        yield stage


def references_of_stock(args: argparse.Namespace, stage: Stage) -> dict[Question, Answer]:
    """Plain llama-server's answers, one at a time, without engine, drafts and weights in another layout."""
    arguments = ["-np", "1", "-t", "1", "--no-repack", "--cache-ram", "0", *stage.adapter_arguments()]
    with llama_server(bin_dir(), stage.folder, *arguments, draft=False, target=args.model) as port:
        asker = Asker(f"http://127.0.0.1:{port}", n_adapters=len(stage.adapters), adapter_slot=0)
        with contextlib.closing(asker):
            return find_references(asker, all_questions(len(stage.adapters), args.seed))


def start_server(args: argparse.Namespace, stage: Stage) -> Serve:
    passed = ["-np", str(N_SLOTS), *ONE_THREAD, "--cache-ram", "0", *stage.adapter_arguments()]
    passed += ["--slot-save-path", f"{stage.slots_folder}/"]
    drafting = ["--speculation", "auto"] if args.draft else []
    return Serve(
        stage.folder, *drafting, passed=passed, draft=args.draft is not None,
        pair=(args.model, args.draft or DRAFT), variables=TIGHT_HEAP | stage.system,
    )  # fmt: skip
