"""Draft-length controllers on simulated curves: what a stream loses at worst, and what it gains in the mean.

In: nothing; no model is loaded. Out: per setting the worst stream's speed over never speculating, the mean of
all streams', and the mix's speed over the best fixed length. Seeded, so two runs print the same, but for the
time that one decision takes.

    python benchmarks/replay_speculation.py
    python benchmarks/replay_speculation.py --seeds 20 --controllers forecast,cascade,static
    python benchmarks/replay_speculation.py --settings server,three --costs switch --streams    # every stream
    python benchmarks/replay_speculation.py --json -                                # one JSON object

A scenario is a setting (how the machine behaves), costs T(n), a drafter and a text: four requests of 128
tokens through one `Speculation` that starts with nothing known.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

from pyspac.engine.step import StepRecord
from pyspac.lab.drafts.controllers import parse_lab_controller
from pyspac.lab.drafts.simulator import Machine, Phase, Simulation, Text
from pyspac.speculation.controller import Controller
from pyspac.speculation.manager import MakeController, Speculation
from pyspac.speculation.static import Static

N_DRAFT_MAX: Final = 8
N_REQUESTS: Final = 4
N_TOKENS: Final = 128  # per request
FIXED_LENGTHS: Final = (0, 1, 2, 3, 5, 8)  # the best of them is what the mix is compared with
WANTED: Final = {"ngram": 0.05, "draft": 0.08}  # loss of the worst stream at most
WANTED_MIX: Final = 0.98  # of the best fixed length

# (acceptance at positions 1, 2, ..., share of steps in which an n-gram drafter has something to say)
CURVES: Final[dict[str, tuple[tuple[float, ...], float]]] = {
    "code": ((0.85, 0.88, 0.9), 0.7),
    "prose": ((0.3, 0.4, 0.5), 0.4),
    "lists": ((0.95, 0.97), 0.9),
    "vain": ((0.03,), 0.8),
}
# text -> the kinds that its requests consist of, in turn
TEXTS: Final = {
    "code": [["code"]],
    "prose": [["prose"]],
    "lists": [["lists"]],
    "mix": [["code"], ["prose"], ["lists"], ["prose"]],
    "turns": [["lists", "vain"], ["vain", "code"]],  # in the middle of each request
    "vain": [["vain"]],
}

# T(n) / T(1), by n - 1
COSTS: Final[dict[str, Callable[[int], float]]] = {
    "union": lambda i: 0.25 + 0.75 * (1 + i) ** 0.65,  # of experts, in published traces: 4.2 at 9 tokens
    "switch": lambda i: 1.0 if i == 0 else 2.5 + 0.12 * i,  # of kernels
    "cheap": lambda i: 1.0 + 0.06 * i,
    "dear": lambda i: 1.0 + 0.8 * i,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the machine behaves, and who decodes."""

    step_us: float = 10_000.0  # T(1)
    n_sequences: int = 1  # in one batch
    lag_steps: int = 0
    draft_share: float = 0.05  # of T(1), per token of a draft model
    machine: Mapping[str, Any] = field(default_factory=dict)  # of Machine
    drafters: Sequence[str] = ("ngram", "draft")


SWITCH_US: Final = 200.0  # a graph of another width, whatever a step takes
SETTINGS: Final = {
    "10ms": Setting(machine={"switch_us": SWITCH_US}),
    "0.7ms": Setting(step_us=700.0, machine={"switch_us": SWITCH_US, "noise": 0.1}),
    "1ms": Setting(step_us=1_000.0, machine={"switch_us": SWITCH_US}),
    "100ms": Setting(step_us=100_000.0, machine={"switch_us": SWITCH_US}),
    "shared": Setting(machine={"noise": 0.1, "outlier_rate": 0.02, "slow_rate": 0.02}),
    "longer": Setting(machine={"drift": 0.7}),
    "warmer": Setting(machine={"drift": -0.7}),
    "dear-drafts": Setting(draft_share=0.2, drafters=("draft",)),
    "server": Setting(lag_steps=1, drafters=("draft",)),
    "three": Setting(lag_steps=1, n_sequences=3, drafters=("draft",)),
}


class Scenario(NamedTuple):
    """One cell of the table."""

    setting: str
    costs: str
    drafter: str
    text: str


def scenarios(settings: Sequence[str], costs: Sequence[str], drafters: Sequence[str]) -> Iterator[Scenario]:
    """All that fit together."""
    for scenario in map(Scenario._make, product(settings, costs, drafters, TEXTS)):
        if scenario.drafter in SETTINGS[scenario.setting].drafters:
            yield scenario


# ----------------------------------------------------------------------------------------------- one run


def machine_of(scenario: Scenario) -> Machine:
    """Its times."""
    setting = SETTINGS[scenario.setting]
    shape, n = COSTS[scenario.costs], setting.n_sequences * (1 + N_DRAFT_MAX)
    us = Machine(verify_us=[setting.step_us * shape(i) for i in range(n)])
    if scenario.drafter == "draft":
        us = replace(us, draft_us=setting.draft_share * setting.step_us, catch_up_us=0.006 * setting.step_us)
    return replace(us, **setting.machine)


def texts_of(scenario: Scenario, request: int, seed: int) -> Iterator[Text]:
    """One per sequence; equal seeds give every controller the same."""
    kinds = TEXTS[scenario.text][request % len(TEXTS[scenario.text])]
    for i in range(SETTINGS[scenario.setting].n_sequences):
        phases = [
            Phase(
                n_tokens=N_TOKENS // len(kinds),
                acceptance=CURVES[kind][0],
                hit_rate=CURVES[kind][1] if scenario.drafter == "ngram" else 1.0,
            )
            for kind in kinds
        ]
        yield Text(phases, N_DRAFT_MAX, 1000 * seed + 10 * request + i)


def tokens_per_s(scenario: Scenario, controller: str | MakeController, seed: int) -> float:
    """Of a whole stream."""
    setting, machine = SETTINGS[scenario.setting], machine_of(scenario)
    speculation = Speculation(controller, n_draft_max=N_DRAFT_MAX, lag_steps=setting.lag_steps)
    n_tokens, total_us = 0, 0.0
    for request in range(N_REQUESTS):
        result = Simulation(
            machine,
            list(texts_of(scenario, request, seed)),
            [speculation.begin(i) for i in range(setting.n_sequences)],
            seed=1000 * seed + request,
            lag_steps=setting.lag_steps,
        ).run()
        n_tokens += result.n_tokens
        total_us += result.total_us
    return 1e6 * n_tokens / total_us


class Speeds(NamedTuple):
    """Of one scenario; geometric means over the seeds."""

    over_none: dict[str, float]  # by controller
    over_fixed: dict[str, float]  # by controller, over the best fixed length
    lowest: dict[str, float]  # by controller, over none: the worst seed


def replay(scenario: Scenario, controllers: Sequence[str], seeds: int) -> Speeds:
    """Run everyone through the same texts."""
    fixed = {
        k: [tokens_per_s(scenario, static_length(k), seed) for seed in range(seeds)] for k in FIXED_LENGTHS
    }
    best = max(_mean_ratio(speeds, fixed[0]) for speeds in fixed.values())
    speeds = {name: [tokens_per_s(scenario, name, seed) for seed in range(seeds)] for name in controllers}
    over_none = {name: _mean_ratio(speeds[name], fixed[0]) for name in controllers}
    over_fixed = {name: ratio / best for name, ratio in over_none.items()}
    lowest = {name: min(map(_ratio, speeds[name], fixed[0])) for name in controllers}
    return Speeds(over_none, over_fixed, lowest)


def static_length(n_draft: int) -> MakeController:
    return lambda shared: Static(shared, n_draft)


def _ratio(a: float, b: float) -> float:
    return a / b


def _mean_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    return _geometric_mean(map(_ratio, a, b))


def _geometric_mean(values: Iterator[float] | Sequence[float]) -> float:
    return math.exp(fmean(map(math.log, values)))


# --------------------------------------------------------------------------------------------- summaries


class Summary(NamedTuple):
    """One controller, one drafter, some scenarios."""

    loss: float  # of the worst scenario
    worst: str  # which
    loss_run: float  # of the worst run of one seed
    mean: float  # speed over none
    mix: float  # speed of the mix over the best fixed length
    worst_mix: float


def summary(found: Mapping[Scenario, Speeds], name: str) -> Summary:
    """Of some scenarios."""
    worst = min(found, key=lambda scenario: found[scenario].over_none[name])
    mixes = [speeds.over_fixed[name] for scenario, speeds in found.items() if scenario.text == "mix"]
    return Summary(
        loss=1 - found[worst].over_none[name],
        worst=f"{worst.setting}, {worst.costs}, {worst.text}",
        loss_run=1 - min(speeds.lowest[name] for speeds in found.values()),
        mean=_geometric_mean([speeds.over_none[name] for speeds in found.values()]),
        mix=_geometric_mean(mixes),
        worst_mix=min(mixes),
    )


def groups(found: Mapping[Scenario, Speeds]) -> Iterator[tuple[str, str, Mapping[Scenario, Speeds]]]:
    """(setting or "all", drafter, scenarios)"""
    for setting, drafter in product([*SETTINGS, "all"], WANTED):
        group = {s: v for s, v in found.items() if setting in (s.setting, "all") and s.drafter == drafter}
        if group:
            yield setting, drafter, group


def show(found: Mapping[Scenario, Speeds], controllers: Sequence[str]) -> None:
    print(f"{'setting':12} {'drafter':7} {'controller':12} {'mean':>6} {'mix':>6} {'mix >=':>6}  worst loss")
    for setting, drafter, group in groups(found):
        for name in controllers:
            s = summary(group, name)
            print(
                f"{setting:12} {drafter:7} {name:12} {s.mean:6.3f} {s.mix:6.3f} {s.worst_mix:6.3f}  "
                f"{max(0.0, s.loss):5.1%} ({s.worst}; one run: {max(0.0, s.loss_run):.1%})"
            )
    print(
        "mean: speed over never speculating; mix: over the best fixed length, wanted: "
        f"{WANTED_MIX} in the mean;\nworst loss against never speculating, wanted: at most "
        + ", ".join(f"{loss:.0%} ({drafter})" for drafter, loss in WANTED.items())
    )


def show_streams(found: Mapping[Scenario, Speeds], controllers: Sequence[str]) -> None:
    for scenario, speeds in found.items():
        cells = (f"{name} {speeds.over_none[name]:.3f} {speeds.over_fixed[name]:.3f}" for name in controllers)
        print(f"{' '.join(scenario):34}", "; ".join(cells))
    print("speed over never speculating, speed over the best fixed length")


def decision_us(name: str) -> float:
    """What looking at a step and deciding the next takes here, in the mean."""
    taken: list[int] = []

    def make(shared: Any) -> Controller:
        controller = parse_lab_controller(name)(shared)
        plain_observe = controller.observe

        def observe(record: StepRecord) -> None:
            before = time.perf_counter_ns()
            plain_observe(record)
            controller.next_n_draft()
            taken.append(time.perf_counter_ns() - before)

        controller.observe = observe  # type: ignore[method-assign]
        return controller

    for costs in COSTS:
        tokens_per_s(Scenario("100ms", costs, "draft", "mix"), make, 0)
    return fmean(taken) / 1e3


def to_dict(found: Mapping[Scenario, Speeds], controllers: Sequence[str]) -> dict[str, Any]:
    """The object of --json."""
    return {
        "groups": [
            {"setting": setting, "drafter": drafter, "controller": name, **summary(group, name)._asdict()}
            for setting, drafter, group in groups(found)
            for name in controllers
        ],
        "streams": [{**scenario._asdict(), **speeds._asdict()} for scenario, speeds in found.items()],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def names(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--controllers", type=names, default=["forecast"])
    parser.add_argument("--settings", type=names, default=list(SETTINGS), help=", ".join(SETTINGS))
    parser.add_argument("--costs", type=names, default=list(COSTS), help=", ".join(COSTS))
    parser.add_argument("--drafters", type=names, default=list(WANTED), help=", ".join(WANTED))
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--streams", action="store_true", help="print every scenario")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write results as JSON; -: to standard output"
    )
    return parser.parse_args()


def main() -> None:
    args = parse()
    cells = list(scenarios(args.settings, args.costs, args.drafters))
    n = len(cells)
    with ProcessPoolExecutor(args.jobs) as pool:
        speeds = pool.map(replay, cells, [args.controllers] * n, [args.seeds] * n, chunksize=4)
        found = dict(zip(cells, speeds, strict=True))
    if args.json:
        text = json.dumps(to_dict(found, args.controllers), indent=1) + "\n"
        sys.stdout.write(text) if str(args.json) == "-" else args.json.write_text(text)
    if str(args.json) == "-":
        return
    if args.streams:
        show_streams(found, args.controllers)
    show(found, args.controllers)
    for name in args.controllers:
        print(f"{name}: looking at a step takes {decision_us(name):.0f} us here, in the mean")


if __name__ == "__main__":
    main()
