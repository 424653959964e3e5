"""The ways to run a model that `pyspac bench` compares: llama.cpp's, and pyspac's."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pyspac.engine.devices import fits_memory
from pyspac.generate.loading import Loading
from pyspac.generate.options import CacheSize, RunOptions
from pyspac.generate.session import Session
from pyspac.generate.spec_types import DRAFT_LORA
from pyspac.model.geometry import LayerGeometry

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
    """One of them; `flags`: those of `program` for it."""

    flags: str
    options: RunOptions
    is_own: bool
    program: str = "pyspac run"


def find_ways(options: RunOptions, loading: Loading, mtp: Path | None = None) -> dict[str, Way]:
    """By their names. `options`: of pyspac, with a draft, if there is one; `loading`: of these."""
    plain = replace(options, draft=None, spec_type=None)
    stock = replace(plain, stock=True, ram=None)
    repacked = replace(stock, repack=True)
    ways = {
        "llama.cpp": Way("--stock", repacked, False),
        "llama.cpp, weights as in the file": Way("--stock --no-repack", stock, False),
    }
    if not loading.device.is_cpu:
        n = n_cpu_moe(loading.preflight.geometry.moe_layers, _pool_bytes(plain))
        tuned = replace(stock, n_cpu_moe=n)
        ways[f"llama.cpp, --n-cpu-moe {n}"] = Way(f"-ngl 99 --n-cpu-moe {n}", tuned, False, "llama-cli")
    own = _own_ways(plain, has_cache=loading.device.has_cache)
    ways |= own
    best = next(iter(own))
    for name in ("llama.cpp", best):
        way = _with_drafts(ways[name], options)
        ways[f"{name}, {way.options.wanted_spec_type}"] = way
    if mtp is not None:
        way = ways[best]
        flags = f"{way.flags} --mtp {shlex.quote(str(mtp))}"
        ways[f"{best}, {DRAFT_LORA}"] = replace(way, flags=flags, options=replace(way.options, mtp=mtp))
    return ways


def _own_ways(options: RunOptions, *, has_cache: bool) -> dict[str, Way]:
    """Without drafts: the split first, where there is a device."""
    ram = "" if options.ram is None else f" --ram {options.ram}"
    on_host = replace(options, device="none", rpc=None, tensor_split=(), cache=CacheSize(text="auto"))
    host = Way(f"--device none{ram}", on_host, True)
    if not has_cache:
        return {"pyspac": host}
    rpc = "" if options.rpc is None else f" --rpc {options.rpc}"
    numbers = ",".join(f"{number:g}" for number in options.tensor_split)
    shares = f" -ts {numbers}" if numbers else ""
    flags = f"--device {options.device}{rpc}{shares} --cache {options.cache.text}{ram}"
    split = Way(flags, options, True)
    return {"pyspac, split": split, "pyspac, no device": host}


def _with_drafts(way: Way, options: RunOptions) -> Way:
    """By the draft model or head, or from the text so far."""
    if options.draft is None:
        flags, drafting = "--spec-type ngram", replace(way.options, spec_type="ngram")
    else:
        flags = f"-md {shlex.quote(str(options.draft))}"
        if options.spec_type is not None:
            flags += f" --spec-type {options.spec_type}"
        drafting = replace(way.options, draft=options.draft, spec_type=options.spec_type)
    return replace(way, flags=f"{way.flags} {flags}", options=drafting)


def _pool_bytes(options: RunOptions) -> int:
    """Device memory that the split takes for experts."""
    with Session(options) as session:
        return session.split.info.pool_bytes if session.split else 0


def n_cpu_moe(layers: tuple[LayerGeometry, ...], pool_bytes: int) -> int:
    """The least N for llama.cpp's --n-cpu-moe with which the experts of the other layers fit."""
    room = pool_bytes
    for layer in reversed(layers):
        room -= layer.n_expert * layer.expert_bytes
        if room < 0:
            return layer.il + 1
    return 0


def fit_together(ways: dict[str, Way], loading: Loading) -> bool:
    """Whether all of them may be loaded at the same time."""
    if not loading.device.is_cpu or loading.ram_mib is not None:
        return False  # each takes the device's memory that is free, or the memory that the others left
    n_bytes = loading.preflight.geometry.model_bytes * len(ways)
    drafts = [way.options.draft.stat().st_size for way in ways.values() if way.options.draft]
    return fits_memory(n_bytes + sum(drafts))
