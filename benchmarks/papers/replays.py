"""A trace, policies and a paper's machine in, measures out; every run once."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from pyspac.lab.combos import find_setup
from pyspac.lab.machine import PRESETS, Machine
from pyspac.lab.setup import Setup
from pyspac.lab.simulator import simulate
from pyspac.lab.trace import Trace
from pyspac.lab.workload import Phase, Workload, make_workload

Row = dict[str, Any]
RTX4090: Final = PRESETS["rtx4090"]

_workloads: dict[tuple[int, int, float, str, int], Workload] = {}  # by the trace's id, which lives as long


def workload(trace: Trace, k: int, accept: float, phase: Phase = "decode", seed: int = 0) -> Workload:
    """Return the trace as steps; made once."""
    key = (id(trace), k, accept, phase, seed)
    if key not in _workloads:
        _kept.append(trace)
        _workloads[key] = make_workload(trace, k, accept, phase, seed)
    return _workloads[key]


_kept: list[Trace] = []  # so that no id is given away twice


def replay(
    trace: Trace,
    policy: str,
    machine: Machine,
    *,
    k: int = 0,
    accept: float = 0.8,
    phase: Phase = "decode",
    eviction: str = "",
    **fields: Any,
) -> Row:
    """Return the measures of a combination or an eviction policy; `eviction`: instead of the combination's.

    `fields`: of Setup.
    """
    setup, forced_k = find_setup(policy, Setup(**fields))
    setup = replace(setup, eviction=eviction or setup.eviction)
    return simulate(workload(trace, k if forced_k is None else forced_k, accept, phase), setup, machine)


@lru_cache(maxsize=32)
def machine(name: str, *, link: float, device: float, draft_ms: float = 0.0) -> Machine:
    """Return a GPU machine: link and device in GB/s, one drafted token in ms; the rest as `rtx4090`."""
    return replace(RTX4090, name=name, link_gb_s=link, device_gb_s=device, draft_us=1e3 * draft_ms)
