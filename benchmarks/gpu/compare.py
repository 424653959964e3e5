"""Phase `compare`: the contenders in turns, at equal device memory for experts; one JSON row each.

A model is loaded once per placement of its experts. A visit of a contender opens a context (and attaches an
engine), generates warm-up and measured tokens after the same prompt, and closes it again. Round by round the
order rotates.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from arms import BASELINE, Arm, chosen_arms
from bench import Bench, choose_threads, compute_reference, load, open_bench, say
from rows import conditions, rows_of
from settings import Settings
from visit import Visit, visit

RESERVE_S = 12.0  # for closing, rows and table


def take_turns(
    bench: Bench, arms: Sequence[Arm], deadline: Callable[[], float], say: Callable[[str], None]
) -> tuple[dict[str, list[Visit]], str | None]:
    """Visits per contender, as many whole rounds as fit; and why there are fewer than asked for."""
    visits: dict[str, list[Visit]] = {arm.name: [] for arm in arms}
    longest = 0.0
    for i_round in range(bench.s.rounds):
        if i_round and deadline() < longest * 1.1:
            return visits, f"{i_round} of {bench.s.rounds} rounds: the time is over"
        start = time.monotonic()
        for i in range(len(arms)):
            arm = arms[(i + i_round) % len(arms)]
            if deadline() <= 0:
                whole = min(len(v) for v in visits.values())
                return {name: v[:whole] for name, v in visits.items()}, f"{whole} rounds: the time is over"
            visits[arm.name].append(visit(bench, arm))
        longest = max(longest, time.monotonic() - start)
        say(f"{arms[0].group}, round {i_round + 1}: {one_round(visits)}")
    return visits, None


def one_round(visits: dict[str, list[Visit]]) -> str:
    return ", ".join(f"{name} {v[-1].tps:.1f}" for name, v in visits.items() if v)


def run(
    s: Settings, left_s: float, model_path: str, emit: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """All groups of contenders; rows go to `emit` as soon as a group is done."""
    end = time.monotonic() + left_s - RESERVE_S

    def deadline() -> float:
        return end - time.monotonic()

    skipped: list[list[str]] = []
    with contextlib.ExitStack() as stack:
        bench = open_bench(s, Path(model_path), stack, say)
        arms = without_impossible(bench, chosen_arms(s), skipped)
        if any(arm.placement == "ncmoe" for arm in arms):
            bench.models["ncmoe"] = stack.enter_context(load(bench, bench.on_device, say))
        bench.n_threads = choose_threads(bench, say)
        bench.reference = compute_reference(bench)
        for name in dict.fromkeys(arm.group for arm in arms):
            group = [arm for arm in arms if arm.group == name]
            if deadline() <= 0:
                skipped.append([name, "the time is over"])
                continue
            visits, why = take_turns(bench, group, deadline_of(name, arms, deadline), say)
            if why:
                skipped.append([f"rounds of {name}", why])
            if visits[BASELINE]:
                for row in rows_of(bench, group, visits):
                    emit(row | conditions(bench))
    return {"result": f"{len(bench.models)} placements, {bench.n_threads} threads", "skipped": skipped}


def deadline_of(name: str, arms: Sequence[Arm], deadline: Callable[[], float]) -> Callable[[], float]:
    """The controls leave a third of the time to the ablations, where both are asked for."""
    if name != "controls" or all(arm.group == "controls" for arm in arms):
        return deadline
    kept = deadline() / 3
    return lambda: deadline() - kept


def without_impossible(bench: Bench, arms: list[Arm], skipped: list[list[str]]) -> list[Arm]:
    """Leave out --n-cpu-moe where it means nothing."""
    why = None
    if bench.device.is_cpu:
        why = "the device is the CPU, so all experts are on the host"
    elif not bench.on_device:
        why = f"no layer's experts fit into --cache {bench.s.cache}: it would equal stock"
    if why is None or all(arm.placement != "ncmoe" for arm in arms):
        return arms
    skipped.append(["ncmoe-ar, ncmoe-sd", why])
    return [arm for arm in arms if arm.placement != "ncmoe"]
