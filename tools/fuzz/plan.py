"""What one seed means: a model, two contexts, an engine, and a list of operations. Only data, as JSON.

Operations name sequences, shares and seeds, never positions: each means something whatever came before it, so
that a list can lose any of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Any, Final

Json = dict[str, Any]

N_OPERATIONS: Final = 120
MODES: Final = ("slots", "ram", "both")
MODELS: Final = (
    ("qwen3moe", "mixed"),
    ("gpt-oss", "mxfp4"),
    ("deepseek2", "k-quants"),
    ("glm4moe", "q8"),
    ("qwen3next", "mixed"),
    ("qwen3moe", "iq"),
)
WITHOUT_KERNELS: Final = ("iq",)  # of the engine's own, for some layers
N_SEQ: Final = 3
N_SAVED: Final = 3  # places for states


def make_case(seed: int, mode: str | None = None, without: Collection[str] = ()) -> Json:
    """The case of this seed, of one mode or any, without these kinds of operations."""
    rng = random.Random(f"fuzz-{seed}")
    mode = mode or rng.choice(MODES)
    arch, types = rng.choice(MODELS)
    context = {
        "is_unified": rng.random() < 0.5,
        "n_ubatch": rng.choice((16, 64, 64)),
        "flash": rng.random() < 0.6,
        "n_threads": rng.randint(1, 3),
    }
    operations = [{"op": "attach", **_attach(rng, mode)}] if rng.random() < 0.8 else []
    without = {*without, "disk"} if mode == "slots" else without
    kinds = [kind for kind in KINDS if kind not in without]
    weights = [KINDS[kind][0] for kind in kinds]
    while len(operations) < N_OPERATIONS:
        kind = rng.choices(kinds, weights)[0]
        operations.append({"op": kind, **KINDS[kind][1](rng, mode)})
    return {
        "seed": seed, "mode": mode, "arch": arch, "types": types, "context": context,
        "operations": operations,
    }  # fmt: skip


def _seed(rng: random.Random) -> int:
    return rng.randrange(1 << 30)


def _sequence(rng: random.Random) -> int:
    return rng.randrange(N_SEQ)


def _attach(rng: random.Random, mode: str) -> Json:
    """Fields of EngineParams."""
    fields: Json = {"next_layer": rng.choice((0, 0, 0, 1, 2)), "n_threads": rng.choice((0, 0, 1, 3))}
    if mode == "ram":
        fields |= {"device": "none", "cache": "0"}
    else:
        fields |= {"device": "cpu", "cache": rng.choice(("20%", "50%", "100%")), "fill": rng.random() < 0.5}
        fields |= {"host_mode": rng.choice(("in-graph", "executor")), "max_batch": rng.choice((4, 16, 40))}
        fields |= {"copy_gb_s": rng.choice((0.0, 0.0, 0.3)), "evict": rng.random() < 0.9}
    if mode != "slots":
        fields["ram"] = rng.choice(("60%", "80%", "100%"))
    return {"fields": fields}


def _no_threads(rng: random.Random, _mode: str) -> Json:
    """While the engine is attached the next time, every n-th thread cannot be had."""
    return {"every": rng.choice((1, 2, 3, 7, 20, 35, 50))}


def _decode(rng: random.Random, _mode: str) -> Json:
    """1 to 40 tokens of one sequence or several, now and then a longer prompt."""
    n_parts = rng.choice((1, 1, 1, 2, 3))
    width = rng.choice((1, 1, 2, 5, rng.randint(1, 40), rng.randint(17, 40)))
    if n_parts == 1 and rng.random() < 0.05:
        width = rng.randint(41, 100)
    parts = [
        {"seq": seq, "n": max(1, width // n_parts), "seed": _seed(rng)}
        for seq in rng.sample(range(N_SEQ), n_parts)
    ]
    return {"parts": parts, "outputs": rng.choice(("all", "all", "last", "some", "none"))}


def _cancel(rng: random.Random, mode: str) -> Json:
    """A decode that the program's abort callback ends when it is asked for the n-th time."""
    return {**_decode(rng, mode), "after": rng.choice((0, 1, rng.randint(0, 60), rng.randint(0, 300)))}


def _seq_rm(rng: random.Random, _mode: str) -> Json:
    """A sequence's end, its middle, or all of it; shares of its positions."""
    begin, end = rng.choice(((rng.random(), 1.0), (rng.random(), 1.0), (0.2, 0.5), (0.0, 1.0)))
    return {"seq": _sequence(rng), "begin": begin, "end": end}


def _seq_cp(rng: random.Random, _mode: str) -> Json:
    source, target = rng.sample(range(N_SEQ), 2)
    return {"seq": source, "to": target}


def _shift(rng: random.Random, _mode: str) -> Json:
    return {"seq": _sequence(rng), "begin": rng.uniform(0, 0.4), "share": rng.uniform(0.05, 0.5)}


def _state(rng: random.Random, _mode: str) -> Json:
    """-1: of the whole context."""
    return {"seq": rng.choice((-1, *range(N_SEQ))), "place": rng.randrange(N_SAVED)}


def _restore(rng: random.Random, _mode: str) -> Json:
    """Each context its own state, or the engine's the stock's."""
    return {"place": rng.randrange(N_SAVED), "is_crossed": rng.random() < 0.5, "to": _sequence(rng)}


def _lora(rng: random.Random, _mode: str) -> Json:
    scales = rng.choice(([0, 0], [0, 0], [1, 0], [0, 1], [0.5, 1]))
    return {"scales": scales}  # of the adapters of attention and experts


def _disk(rng: random.Random, mode: str) -> Json:
    kind = rng.choice(("none", "none", "fail", "short", "slow"))
    return {"kind": kind, "every": rng.choice((1, 2, 3, 10, 50, 200))}


def _plan(rng: random.Random, _mode: str) -> Json:
    """A decision of the scheduler; it is taken over at once, waited for, or left to the next forward."""
    return {"seed": _seed(rng), "then": rng.choice(("nothing", "apply", "wait"))}


def _callback(rng: random.Random, _mode: str) -> Json:
    return {"is_set": rng.random() < 0.7}


def _threads(rng: random.Random, _mode: str) -> Json:
    return {"n": rng.randint(1, 3), "n_batch": rng.randint(1, 3)}


def _nothing(_rng: random.Random, _mode: str) -> Json:
    return {}


# kind -> (how often, its arguments)
KINDS: Final[dict[str, tuple[float, Callable[[random.Random, str], Json]]]] = {
    "decode": (40, _decode),
    "plan": (12, _plan),
    "cancel": (8, _cancel),
    "disk": (6, _disk),
    "seq_rm": (5, _seq_rm),
    "seq_cp": (4, _seq_cp),
    "shift": (4, _shift),
    "save": (3, _state),
    "restore": (3, _restore),
    "lora": (4, _lora),
    "callback": (3, _callback),
    "threads": (3, _threads),
    "attach": (4, _attach),
    "no_threads": (1, _no_threads),
    "free": (2, _nothing),
    "look": (2, _nothing),
}
