"""Named combinations of policies: the papers' systems, the baselines, and what pyspac ships."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from pyspac.errors import ConfigError
from pyspac.lab.registry import names
from pyspac.lab.setup import Setup
from pyspac.scheduler.config import ABLATIONS


@dataclass(frozen=True, slots=True)
class Combination:
    """A setup, where it comes from, and the draft length if it insists on one."""

    setup: Setup
    about: str
    k: int | None = None


def _combination(
    about: str, k: int | None = None, without: tuple[str, ...] = (), **policies: str
) -> Combination:
    return Combination(Setup(without=frozenset(without), **policies), about, k)  # type: ignore[arg-type]


COMBINATIONS: Final[dict[str, Combination]] = {
    "pyspac": _combination("what pyspac ships: ema utilities, balanced tau, host experts", eviction="ema"),
    "moe-spac": _combination("MoE-SpAc: Algorithm 1, K = 4, balanced tau", eviction="spac"),
    **{
        f"moe-spac-no-{name}": _combination(
            f"its ablation: {about}",
            k=0 if name == "sd" else None,
            without=() if name == "sd" else (name,),
            eviction="spac",
        )
        for name, about in ABLATIONS.items()
    },
    "specmd-1": _combination(
        "SpecMD #1 (Eliseev and Mazur): next-layer prefetch, LRU, fetch",
        eviction="lru", prefetch="next-layer", miss="fetch",
    ),
    "specmd-2": _combination(
        "SpecMD #2 (Zhu et al.): score prefetch, score eviction, substitute",
        eviction="score", prefetch="score", miss="substitute",
    ),
    "specmd-3": _combination(
        "SpecMD #3 (HOBBIT): next-layer prefetch, LHU, cascade 8:4:2",
        eviction="lhu", prefetch="next-layer", miss="fetch-priority",
    ),
    "specmd-4": _combination(
        "SpecMD #4 (MixtureCache): LRU, fetch, cache-aware routing",
        eviction="lru", prefetch="none", miss="fetch", routing="cache-aware",
    ),
    "specmd-5": _combination(
        "SpecMD #5: score prefetch, cyclic Least-Stale, fetch",
        eviction="least-stale:cyclic=1", prefetch="score", miss="fetch",
    ),
    "moe-infinity": _combination(
        "MoE-Infinity-like: the sequence's most used experts ahead, LFU, fetch",
        eviction="lfu", prefetch="history", miss="fetch",
    ),
    "sp-moe": _combination(
        "SP-MoE: draft-side gate (recorded, if the trace has it) up to a cutoff layer, LRU, fetch",
        eviction="lru", prefetch="draft-gate", miss="fetch",
    ),
    "hybrimoe": _combination(
        "HybriMoE-like: score cache, next-layer prefetch, misses split between host and link",
        eviction="score", prefetch="next-layer", miss="balance",
    ),
    "n-cpu-moe": _combination("llama.cpp --n-cpu-moe at the same bytes", eviction="static", miss="host"),
    "llama.cpp": _combination(
        "llama.cpp --moe-cache-mib: LRU, every miss uploaded", eviction="lru", miss="fetch"
    ),
    "host-admit": _combination(
        "LRU, misses on the host, two copies per layer", eviction="lru", miss="host-admit"
    ),
}  # fmt: skip

DEFAULT_SWEEP: Final = (
    "lru", "lfu", "least-stale", "least-stale:cyclic=1", "farthest-layer", "farthest-layer:cyclic=1",
    "score", "arc", "belady", "unbounded", "ema", "spac", "last", "n-cpu-moe",
)  # fmt: skip


def find_setup(name: str, base: Setup) -> tuple[Setup, int | None]:
    """Return the setup of a combination or an eviction policy, with `base`'s capacity and so on.

    What `base` says itself of prefetch, misses and routing stands before what the combination says.
    """
    if name in COMBINATIONS:
        found = COMBINATIONS[name].setup
        setup = replace(
            base, label=name, eviction=found.eviction, without=found.without | base.without,
            **{part: getattr(found if getattr(base, part) == default else base, part)
               for part, default in (("prefetch", "auto"), ("miss", "auto"), ("routing", "standard"))},
        )  # fmt: skip
        return setup, COMBINATIONS[name].k
    if name.partition(":")[0] in names("eviction"):
        return replace(base, label=name, eviction=name), None
    known = [*COMBINATIONS, *names("eviction")]
    raise ConfigError("the policy", name, f"one of {', '.join(known)}")
