"""Would drafts gain if their length followed from their own misses (EVICT, EcoSpec)? Traces in, gains out.

    python benchmarks/replay_misses.py --traces DIR       # qwen.route.csv, gemma.route.csv; half a minute

Residents are the experts that recent tokens used most, at each token of a recorded text; a draft's time grows
with the absent experts that its tokens touch. Three choices of the length, against the best fixed one, in
expectation over which drafts hold (no luck is drawn): by a dynamic programme that knows all that follows, the
bound; by the draft's exact misses; by misses that a predictor of 0.86 recall would see (as `token` has on the
demo). Replayed, and predicted as `rtx4090` and `cpu-ssd`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pyspac.lab.machine import PRESETS, Machine
from pyspac.lab.trace import NOT_RUN, TokenStatus, Trace
from pyspac.lab.trace_file import read_trace
from pyspac.speculation.utility import expected_tokens

K_MAX: Final = 8
LENGTHS: Final = np.arange(K_MAX + 1)
DECAY: Final = 0.97  # of what makes an expert resident, per token
RECALL: Final = 0.86
WINDOW: Final = 16  # tokens whose speed a gained token is worth
Times = npt.NDArray[Any]  # [n_position, K_MAX + 1]


def used(trace: Trace) -> npt.NDArray[np.bool_]:
    """Return [n_token, n_layer, n_expert] what each token used."""
    g = trace.geometry
    found = np.zeros((trace.n_token, g.n_layer, g.n_expert + 1), bool)
    experts = np.where(trace.experts == NOT_RUN, g.n_expert, trace.experts).astype(np.intp)
    np.put_along_axis(found, experts, values=True, axis=2)
    return found[..., : g.n_expert]


def misses(trace: Trace, capacity: float) -> tuple[Times, Times]:
    """Return what a step of each length misses at each position: exactly, and as a predictor sees it.

    The predictor is calibrated: in the mean over all positions it is right.
    """
    rng = np.random.default_rng(0)
    tokens = used(trace)[trace.status != TokenStatus.REJECTED]
    n_prompt, n_slots = trace.n_prompt, int(capacity * tokens[0].size)
    recent = np.zeros(tokens.shape[1:])
    for token in tokens[:n_prompt]:
        recent = DECAY * recent + token
    n = len(tokens) - n_prompt - K_MAX
    exact, seen = np.zeros((2, n, K_MAX + 1))
    for at in range(n):
        worth = max(np.partition(recent.ravel(), -n_slots)[-n_slots], 1e-9)
        absent, union, guess = recent < worth, np.zeros_like(recent, bool), np.zeros_like(recent, bool)
        for k, token in enumerate(tokens[n_prompt + at : n_prompt + at + K_MAX + 1]):
            union |= token
            right = token & (rng.random(token.shape) < RECALL)
            guess |= right
            guess.ravel()[rng.integers(0, token.size, int(token.sum() - right.sum()))] = True
            exact[at, k], seen[at, k] = np.count_nonzero(union & absent), np.count_nonzero(guess & absent)
        recent = DECAY * recent + tokens[n_prompt + at]
    return exact, seen * (exact.mean(axis=0) / seen.mean(axis=0))


def expected_us(times: Times, accept: float, lengths: npt.NDArray[Any] | None) -> float:
    """Return the time per token; lengths [n_position] None: the best that can be chosen at each."""
    n = len(times)
    rest = np.zeros(n + K_MAX + 2)
    for at in range(n - 1, -1, -1):
        tried = range(K_MAX + 1) if lengths is None else (int(lengths[at]),)
        rest[at] = min(
            times[at, k]
            + sum((accept**i * (1 - accept) if i < k else accept**k) * rest[at + 1 + i] for i in range(k + 1))
            for k in tried
        )
    return float(rest[0]) / n


def choose(times: Times, foreseen: Times, accept: float) -> npt.NDArray[Any]:
    """Return [n_position] lengths: the most tokens gained, at the speed of late, less the time foreseen."""
    gained = np.array([expected_tokens(int(k), accept) for k in LENGTHS])
    per_token = times / gained
    of_late = [per_token[max(at - WINDOW, 0) : max(at, 1)].mean(axis=0).min() for at in range(len(times))]
    return np.asarray((gained * np.array(of_late)[:, None] - foreseen).argmax(axis=1))


def show(name: str, trace: Trace, capacity: float, machine: Machine) -> None:
    """Print a line per acceptance."""
    g = trace.geometry
    exact, seen = misses(trace, capacity)
    base_us = machine.step_us + sum(
        machine.layer_us + machine.device_us(size, size) for size in g.dense_bytes
    )
    miss_us = max(g.expert_bytes) / (machine.host_gb_s * 1e3)
    times, foreseen = (base_us + miss_us * m + machine.draft_us * LENGTHS for m in (exact, seen))
    for accept in (0.7, 0.8, 0.9):
        fixed = [expected_us(times, accept, np.full(len(times), k)) for k in LENGTHS]
        best = min(fixed)
        gains = [
            100 * (best / expected_us(times, accept, lengths) - 1)
            for lengths in (None, choose(times, times, accept), choose(times, foreseen, accept))
        ]
        cells = "  ".join(f"{gain:+6.1f}" for gain in gains)
        print(f"{name:6} {capacity:4.0%} {machine.name:8} {accept:4g}  {int(np.argmin(fixed)):6}  {cells}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draft lengths by the misses of each draft, replayed.")
    parser.add_argument(
        "--traces", type=Path, required=True, help="folder with qwen.route.csv, gemma.route.csv"
    )
    folder = parser.parse_args().traces
    print(
        f"{'trace':6} {'':4} {'machine':8} {'held':4}  best K   bound   exact  {RECALL:g} recall (gain in %)"
    )
    for name in ("qwen", "gemma"):
        trace = read_trace(folder / f"{name}.route.csv")
        for capacity in (0.17, 0.4):
            for machine in ("rtx4090", "cpu-ssd"):
                show(name, trace, capacity, PRESETS[machine])


if __name__ == "__main__":
    main()
