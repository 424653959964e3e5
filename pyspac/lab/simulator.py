"""One workload, one set of policies, one machine, one capacity in; the run's books out.

A step: draft window, then layer by layer the dense part, the router, hits and misses, host and device
experts side by side, and the layer's end when the slowest is done; then the policies look back. All times
are predicted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pyspac.lab.books import Books
from pyspac.lab.cache import LOADING, RESIDENT
from pyspac.lab.machine import Machine
from pyspac.lab.policy import (
    DROP,
    FETCH,
    HOST,
    SUBSTITUTE,
    Bools,
    Demand,
    Eviction,
    Keys,
    Miss,
    MissPlan,
    Prefetch,
    Routing,
    find,
    parse,
)
from pyspac.lab.setup import Setup
from pyspac.lab.state import LayerTimes, RunState, StepTimes
from pyspac.lab.trace import TraceGeometry
from pyspac.lab.workload import Step, Workload


class Run(RunState):
    """One simulation: the state, the policies, and the loop over layers that moves both on."""

    def __init__(self, workload: Workload, setup: Setup, machine: Machine) -> None:
        """Make state and policies; ConfigError names what does not fit."""
        super().__init__(workload, setup, machine)
        self._make_policies()

    def _make_policies(self) -> None:
        setup = self.setup
        name, knobs = parse(setup.eviction)
        eviction_class = find("eviction", name)
        uses_utility = bool(getattr(eviction_class, "estimator", ""))
        self.eviction: Eviction = eviction_class(self, **knobs)
        self.cache.eviction = self.eviction
        default_prefetch = "utility" if uses_utility else "none"
        default_miss = "host" if uses_utility or self.eviction.is_fixed else "fetch"
        self.prefetch_policy: Prefetch = self._make("prefetch", setup.prefetch, default_prefetch)
        self.miss: Miss = self._make("miss", setup.miss, default_miss)
        self.routing: Routing = self._make("routing", setup.routing, "standard")
        self.cache.preload(self.eviction.preload())
        self.policies = (self.eviction, self.prefetch_policy, self.miss, self.routing)

    def _make(self, dimension: str, text: str, default: str) -> Any:
        name, knobs = parse(default if text == "auto" else text)
        return find(dimension, name)(self, **knobs)

    # ---- running

    def run(self) -> Books:
        """Run all steps; return the checked books."""
        for index, step in enumerate(self.workload.steps):
            self._run_step(index, step)
        self.link.advance(self.now)
        self.books.total_us = self.now
        if self.workload.steps[0].n_emitted == 0:  # the prompt was a step
            self.books.total_us -= self.books.ttft_us
        elif self.workload.prompt is not None:
            self.books.ttft_us = prompt_us(self.workload.prompt, self.geometry, self.machine)
        in_cache = self.cache.count(RESIDENT)
        self.books.check(in_cache, self.cache.count(LOADING), self.cache.n_preloaded)
        return self.books

    def _run_step(self, index: int, step: Step) -> None:
        books, start = self.books, self.now
        self.step_index, self.step, self.times = index, step, StepTimes()
        self.cache.step = index
        for policy in self.policies:
            policy.begin_step()
        self.now += step.n_draft * self.machine.draft_us
        self.times.draft_us = self.now - start
        self.link.advance(self.now)
        self.cache.forward += 1
        self.link.begin_forward()
        for demand in step.layers:
            self._run_layer(self.routing.route(demand))
        self.now += self.machine.step_us
        self.times.verify_us = self.now - start - self.times.draft_us
        self.link.advance(self.now)
        if step.n_emitted == 0:
            books.ttft_us = self.now - start
        books.steps += 1
        books.tokens += step.n_emitted
        books.drafted += step.n_draft
        for policy in self.policies:
            policy.end_step()

    def _run_layer(self, demand: Demand) -> None:
        self.il = demand.il
        start = self.now
        dense_bytes = self.geometry.dense_bytes[demand.il]
        self.now += self.machine.layer_us
        self.now += self.machine.device_us(dense_bytes, dense_bytes * len(self.step.tokens))
        self.link.advance(self.now)
        is_hit = self.cache.is_resident(demand.keys)
        runs_here = self.eviction.runs_on_device(demand.keys)
        if runs_here is not None:
            is_hit &= runs_here
        missing = np.flatnonzero(~is_hit)
        self._book_accesses(demand, is_hit, missing)
        self.cache.pin(demand.keys[is_hit])
        self.eviction.use(demand, is_hit)
        self._expire(demand.il)
        if len(missing):
            plan = self.miss.handle(demand, missing)
            self._serve(demand, is_hit, missing, plan, start)
        else:
            self._finish_layer(demand, is_hit, 0.0, start, np.zeros(0, np.intp), self.now)
        self.cache.unpin_all()

    def _expire(self, il: int) -> None:
        """Drop copies that wait for a layer whose turn has come: demand takes over."""
        if self.prefetch_policy.expires and self.link.waiting:
            for key in [key for key in self.link.waiting if key // self.n_expert == il]:
                self.link.drop(key)

    def _book_accesses(self, demand: Demand, is_hit: Bools, missing: npt.NDArray[np.intp]) -> None:
        books, keys = self.books, demand.keys
        books.accesses += len(keys)
        books.hits += len(keys) - len(missing)
        books.misses += len(missing)
        books.activations += int(demand.rows.sum())
        books.covered_activations += int(demand.rows[is_hit].sum())
        if self.cache.has_low_bit:
            books.low_bit_weight += float(demand.weight[is_hit & (self.cache.share[keys] < 1.0)].sum())
        books.router_weight += float(demand.weight.sum()) + demand.lost
        books.lost_weight += demand.lost
        if len(missing):
            gone = keys[missing]
            n_collisions = int(np.count_nonzero(self.cache.evicted_in[gone] == self.step_index))
            books.collision_misses += n_collisions
            books.late_loads += int(np.count_nonzero(self.cache.residency[gone] == LOADING))
            books.misses_by_layer[demand.il] += len(missing)
            books.collisions_by_layer[demand.il] += n_collisions

    # ---- misses

    def _serve(
        self, demand: Demand, is_hit: Bools, missing: npt.NDArray[np.intp], plan: MissPlan, start: float
    ) -> None:
        """Carry a miss plan out; the layer ends when copies, host and device are done."""
        keys = demand.keys[missing]
        lost = (plan.fate == DROP) | (plan.fate == SUBSTITUTE)
        self.books.lost_weight += float(demand.weight[missing[lost]].sum())
        is_host = plan.fate == HOST
        host_rows = demand.rows[missing[is_host]]
        host_bytes = self.cache.bytes_of[keys[is_host]]
        link_busy = self.link.busy_us(self.now)
        arrived = self._fetch(demand, missing, keys, plan)
        self.prefetch_policy.after_router(demand)
        if len(host_rows):
            link_busy = max(link_busy, arrived - self.now)
        host_us = self.machine.host_us(float(host_bytes.sum()), float(host_bytes @ host_rows), link_busy)
        on_device = is_hit.copy()
        on_device[missing[(plan.fate == FETCH) | (plan.fate == SUBSTITUTE)]] = True
        self._finish_layer(demand, on_device, host_us, start, missing[is_host], arrived, is_served=True)

    def _fetch(self, demand: Demand, missing: npt.NDArray[np.intp], keys: Keys, plan: MissPlan) -> float:
        """Copy on demand; return when the last one is there."""
        is_fetch = plan.fate == FETCH
        if not is_fetch.any():
            return self.now
        at = self.now
        late = is_fetch & (self.cache.residency[keys] == LOADING)
        for key in keys[late]:
            at = self.link.wait_for(int(key), at)
        self.cache.pin(keys[late])
        is_fetch &= ~late
        wanted = keys[is_fetch]
        if len(wanted):
            share = np.ones(len(keys)) if plan.share is None else plan.share
            at = self.link.fetch(wanted, share[is_fetch], at)
            self._keep(wanted, share[is_fetch])
            if plan.share is not None:
                is_low = share[is_fetch] < 1.0
                self.cache.has_low_bit |= bool(is_low.any())
                self.books.low_bit_weight += float(demand.weight[missing[is_fetch]][is_low].sum())
        return at

    def _keep(self, wanted: Keys, share: npt.NDArray[np.float64]) -> None:
        if self.eviction.is_fixed:
            kept = np.zeros(len(wanted), bool)
        else:
            kept = self.cache.admit(wanted)
        self.books.bypassed += int(np.count_nonzero(~kept))
        self.cache.share[wanted[kept]] = share[kept]
        self.cache.pin(wanted[kept])
        for key in wanted[kept]:
            self.eviction.loaded(int(key))

    def _finish_layer(
        self,
        demand: Demand,
        on_device: Bools,
        host_us: float,
        start: float,
        on_host: npt.NDArray[np.intp],
        arrived: float,
        *,
        is_served: bool = False,
    ) -> None:
        """Advance to the layer's end: the device's work, the host's, and what had to be waited for."""
        if not is_served:
            self.prefetch_policy.after_router(demand)
        size = float(self.geometry.expert_bytes[demand.il])
        n_device, device_rows = int(np.count_nonzero(on_device)), int(demand.rows[on_device].sum())
        device_us = self.machine.device_us(size * n_device, size * device_rows)
        device_end = self.now + device_us
        if arrived > self.now:  # the last copy's expert runs after it has come
            device_end = max(device_end, arrived + device_us / max(n_device, 1))
        end = max(device_end, self.now + host_us)
        self.books.stall_us += end - self.now - device_us
        self.books.device_us += device_us
        self.books.host_us += host_us
        self.now = end
        self.times.layers[demand.il] = LayerTimes(
            n_device, len(on_host), device_rows, int(demand.rows[on_host].sum()), host_us, end - start
        )


def prompt_us(prompt: Step, geometry: TraceGeometry, machine: Machine) -> float:
    """Return the time of a prompt on stock's path, which leaves the cache alone.

    Per layer the better of two ways: the host computes the experts, or the link brings them all.
    """
    total = machine.step_us
    n_token = len(prompt.tokens)
    for demand in prompt.layers:
        dense, size = geometry.dense_bytes[demand.il], float(geometry.expert_bytes[demand.il])
        n_bytes, row_bytes = size * len(demand.keys), size * float(demand.rows.sum())
        link_us = n_bytes / (machine.link_gb_s * 1e3) + machine.device_us(n_bytes, row_bytes)
        total += machine.layer_us + machine.device_us(dense, dense * n_token)
        total += min(machine.host_us(n_bytes, row_bytes, 0.0), link_us)
    return total


def simulate(workload: Workload, setup: Setup, machine: Machine) -> dict[str, Any]:
    """Return the measures of one run, with what was asked for."""
    run = Run(workload, setup, machine)
    measures = run.run().to_dict()
    predictor = getattr(run.prefetch_policy, "predictor", None)
    return {
        "policy": setup.label or setup.eviction,
        **{name: getattr(run, attr).name for name, attr in _NAMES},
        "routing_setup": setup.routing,
        "capacity": setup.capacity,
        "n_slots": sum(run.group_slots),
        "k": workload.k,
        "machine": machine.name,
        "predictor": predictor.source if predictor else None,  # "recorded", or "assumed 0.85"
        **measures,
    }


_NAMES = (("eviction", "eviction"), ("prefetch", "prefetch_policy"), ("miss", "miss"), ("routing", "routing"))
