"""The ways to run a model that `pyspac bench` compares: llama.cpp's, and pyspac's."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspac.commands.run_flags import parse_run
from pyspac.commands.server_options import own_options
from pyspac.engine.devices import fits_memory
from pyspac.model.geometry import LayerGeometry, MoeGeometry
from pyspac.model.spec_types import DRAFT_LORA
from pyspac.server.options import ServeOptions
from pyspac.talk.interrupt import Interrupt

if TYPE_CHECKING:
    from pyspac.server.plan import Plan

# four kinds of text: code, prose, a list of records, a talk
PROMPTS: Final = {
    "code": '''import csv
from collections import Counter
from pathlib import Path


def read_rows(path: Path) -> list[dict[str, str]]:
    """All rows of a table, one dict each."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def count_cities(rows: list[dict[str, str]]) -> Counter[str]:
    """How often each city is named."""
    return Counter(row["city"] for row in rows if row.get("city"))


def print_largest(path: Path, n: int = 10) -> None:
    """The cities that are named most, and how often."""
    for city, count in count_cities(read_rows(path)).most_common(n):
        print(f"{city:20} {count:6}")


def main(arguments: list[str]) -> int:
''',
    "prose": (
        "The harbour lay still when the first boat came in. Nobody had expected it before noon, as "
        "the wind had turned during the night and the sea outside the walls was rough. The old man "
        "who kept the light walked down to the quay, his lantern still burning in the grey morning, "
        "and watched two sailors throw their ropes. They looked tired. One of them had a bandage "
        "around his hand, and neither of them said a word until the boat was tied. Then the younger "
        "one climbed up the ladder, took off his cap, and asked for the doctor. There was somebody on "
        "board, he said, who had been found on a raft, three days from any coast, and who spoke a "
        "language that none of them knew. The old man"
    ),
    "records": """[
  {"id": 1, "name": "Ada", "city": "London", "born": 1815, "known_for": "notes on the analytical engine"},
  {"id": 2, "name": "Emmy", "city": "Erlangen", "born": 1882, "known_for": "symmetry and conservation"},
  {"id": 3, "name": "Grace", "city": "New York", "born": 1906, "known_for": "the first compilers"},
  {"id": 4, "name": "Alan", "city": "London", "born": 1912, "known_for": "computable numbers"},
  {"id": 5, "name": "Claude", "city": "Petoskey", "born": 1916, "known_for": "the theory of information"},
  {"id": 6, "name": "Edsger", "city": "Rotterdam", "born": 1930, "known_for": "shortest paths"},
""",
    "talk": """A customer talks with somebody who repairs bicycles.

Customer: Good morning. The chain of my bicycle jumps when I go uphill.
Mechanic: Does it jump in every gear, or in the small ones only?
Customer: In the small ones. It began after the winter.
Mechanic: Then the chain is worn, and maybe the sprockets as well. How far did you ride with it?
Customer: About six thousand kilometres, I think, mostly to work and back.
Mechanic: That is a long way for a chain. What will it cost you if we change both? Let me see.
Customer: And how long will it take? I need the bicycle on Friday.
Mechanic:""",
}


@dataclass(frozen=True, slots=True)
class Way:
    """One of them; `flags`: those of `pyspac run` for it."""

    flags: str
    options: ServeOptions
    is_own: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the user gave, as flags of `pyspac run`: with a device, where there is one, and drafting."""

    model: Path
    common: str = ""  # of all ways
    split: str = "--device auto"  # where experts are
    ram: str = ""
    drafting: str = "--spec-type ngram"
    mtp: Path | None = None

    def way(self, *flags: str, is_own: bool) -> Way:
        """Raises ConfigError."""
        text = " ".join(filter(None, flags))
        given = shlex.split(f"-m {shlex.quote(str(self.model))} {self.common} {text}")
        return Way(text, own_options(*parse_run(given)), is_own)


def find_ways(given: Given, plan: Plan, geometry: MoeGeometry) -> dict[str, Way]:
    """By their names, pyspac's own best guess first among its ways. `plan`: of what was given.

    Raises PyspacError.
    """
    ways = {
        "llama.cpp": given.way("--stock", is_own=False),
        "llama.cpp, weights as in the file": given.way("--stock --no-repack", is_own=False),
    }
    if not plan.launch.is_cpu:
        n = n_cpu_moe(geometry.moe_layers, _pool_bytes(given.way(given.split, is_own=True).options))
        name = f"llama.cpp, --n-cpu-moe {n}"
        ways[name] = given.way(f"--stock --n-cpu-moe {n}", is_own=False)
    host = given.way("--device none", given.ram, is_own=True)
    own = {"pyspac": host}
    if not plan.options.is_host_only:
        split = given.way(given.split, given.ram, is_own=True)
        own = {"pyspac, split": split, "pyspac, no device": host}
    best = next(iter(own))
    ways |= own
    for name in ("llama.cpp", best):
        way = given.way(ways[name].flags, given.drafting, is_own=ways[name].is_own)
        ways[f"{name}, {way.options.wanted_spec_type}"] = way
    if given.mtp is not None:
        mtp = f"--mtp {shlex.quote(str(given.mtp))}"
        ways[f"{best}, {DRAFT_LORA}"] = given.way(ways[best].flags, mtp, is_own=True)
    return ways


def _pool_bytes(options: ServeOptions) -> int:
    """Device memory that the split takes for experts."""
    from pyspac.talk.own_server import OwnServer  # loads the engine

    with Interrupt.watch() as interrupt, OwnServer(options, interrupt) as own:
        return int(own.board.devices["pool_bytes"].sum()) if own.board else 0


def n_cpu_moe(layers: Sequence[LayerGeometry], pool_bytes: int) -> int:
    """The least N for llama.cpp's --n-cpu-moe with which the experts of the other layers fit."""
    room = pool_bytes
    for layer in reversed(layers):
        room -= layer.n_expert * layer.expert_bytes
        if room < 0:
            return layer.il + 1
    return 0


def fit_together(ways: dict[str, Way], plan: Plan, geometry: MoeGeometry) -> bool:
    """Whether all of them may be loaded at the same time."""
    if not plan.launch.is_cpu or plan.launch.ram_bytes is not None:
        return False  # each takes the device's memory that is free, or the memory that the others left
    drafts = [way.options.draft.stat().st_size for way in ways.values() if way.options.draft]
    return fits_memory(geometry.model_bytes * len(ways) + sum(drafts))
