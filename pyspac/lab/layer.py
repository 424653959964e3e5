"""One layer of one step: what it asks for in, hits, misses, copies and predicted times out.

The dense part runs, the router is known, hits and misses are told apart, misses meet their fate, and the
layer ends when device, host and link are done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyspac.errors import PyspacError
from pyspac.lab.assembly import Policies
from pyspac.lab.cache import ABSENT, LOADING
from pyspac.lab.demand import Bools, Demand, Floats, Indices, Keys
from pyspac.lab.events import Access, LayerTimes, Routed, RouterOutput
from pyspac.lab.look_ahead import LookAhead
from pyspac.lab.policy import DROP, FETCH, HOST, SUBSTITUTE, Copies, Fate, MissPlan
from pyspac.lab.state import RunState
from pyspac.lab.trace import NOT_RUN
from pyspac.lab.workload import Step

_NOBODY = np.zeros(0, np.intp)


@dataclass(slots=True)
class _Service:
    """Where a layer's experts are computed, and what they wait for."""

    on_device: Bools  # [n]
    on_host: Indices  # indices of the layer's experts
    host_us: float
    arrived_us: float  # when the last copy that the layer waits for is there


class LayerRunner:
    """Serves layers: asks the policies, moves the state on, and keeps the books."""

    def __init__(self, state: RunState, policies: Policies, ahead: Sequence[LookAhead]) -> None:
        """Take the parts of the run that a layer changes; `ahead`: who looks ahead of it."""
        self.state, self.policies, self.ahead = state, policies, ahead
        self.cache, self.link, self.books = state.cache, state.link, state.books
        self.machine, self.geometry = state.machine, state.geometry

    def run(self, step: Step, asked: Demand) -> tuple[Demand, LayerTimes]:
        """Run a layer; return what was served, which a routing policy may have changed, and its times."""
        start_us, il = self.state.now_us, asked.il
        self.state.il = il
        router = self._router_output(step, il)
        demand = self.policies.routing.route(Routed(asked, router))
        self._run_dense_part(il, len(step.tokens))
        access = self._look_up(step, demand, router)
        for predictor in self.ahead:
            predictor.layer_begins(access)
        self._book(access)
        self.cache.pin(demand.keys[access.is_hit])
        self.policies.eviction.on_access(access)
        if self.state.decision.fills:
            levels = self.state.decision.utility[demand.keys]
            self.link.fill(demand, levels, self.cache.n_expert, self.state.now_us)
        self._expire(il)
        service = self._serve(access)
        self.submit(self.policies.prefetch.after_router(access))
        for predictor in self.ahead:
            predictor.after_router(access)
        times = self._finish(demand, service, start_us)
        self.cache.unpin_all()
        return demand, times

    def submit(self, copies: Iterable[Copies]) -> None:
        """Queue what a policy wants to be copied, one bundle after the other."""
        if self.policies.eviction.is_fixed:
            return
        for bundle in copies:
            keys, at_us = bundle.keys, bundle.at_us
            if at_us is None:
                keys, at_us = keys[self.cache.residency[keys] == ABSENT], self.state.now_us
            self.link.submit([(key, bundle.level) for key in keys.tolist()], at_us)

    # ---- before the experts

    def _router_output(self, step: Step, il: int) -> RouterOutput | None:
        trace = self.state.trace
        if trace.logits is None:
            return None
        tokens = step.tokens[trace.experts[step.tokens, il, 0] != NOT_RUN]
        return RouterOutput(trace.experts[tokens, il], trace.weights[tokens, il], trace.logits[tokens, il])

    def _run_dense_part(self, il: int, n_token: int) -> None:
        n_bytes = self.geometry.dense_bytes[il]
        self.state.now_us += self.machine.layer_us
        self.state.now_us += self.machine.device_us(n_bytes, n_bytes * n_token)
        self.link.advance(self.state.now_us)

    def _look_up(self, step: Step, demand: Demand, router: RouterOutput | None) -> Access:
        is_hit = self.cache.is_resident(demand.keys)
        runs_here = self.policies.eviction.runs_on_device(demand.keys)
        if runs_here is not None:
            is_hit &= runs_here
        missing = np.flatnonzero(~is_hit)
        return Access(self.state.step, step.tokens, demand, is_hit, missing, router)

    def _book(self, access: Access) -> None:
        books, demand, keys, is_hit = self.books, access.demand, access.demand.keys, access.is_hit
        books.accesses += len(keys)
        books.hits += len(keys) - len(access.missing)
        books.misses += len(access.missing)
        books.activations += int(demand.rows.sum())
        books.covered_activations += int(demand.rows[is_hit].sum())
        if self.cache.has_low_bit:
            books.low_bit_weight += float(demand.weight[is_hit & (self.cache.share[keys] < 1.0)].sum())
        books.router_weight += float(demand.weight.sum()) + demand.lost
        books.lost_weight += demand.lost
        if len(access.missing):
            gone = keys[access.missing]
            n_collisions = int(np.count_nonzero(self.cache.evicted_in[gone] == access.step))
            books.collision_misses += n_collisions
            books.late_loads += int(np.count_nonzero(self.cache.residency[gone] == LOADING))
            books.misses_by_layer[demand.il] += len(gone)
            books.collisions_by_layer[demand.il] += n_collisions

    def _expire(self, il: int) -> None:
        """Drop copies that wait for a layer whose turn has come: demand takes over."""
        if self.policies.prefetch.expires and self.link.waiting:
            n_expert = self.geometry.n_expert
            for key in [key for key in self.link.waiting if key // n_expert == il]:
                self.link.drop(key)

    # ---- misses

    def _serve(self, access: Access) -> _Service:
        """Ask what becomes of the misses, and carry it out."""
        if not len(access.missing):
            return _Service(access.is_hit, _NOBODY, 0.0, self.state.now_us)
        demand, missing = access.demand, access.missing
        plan = self.policies.miss.handle(access)
        self._check_fates(plan.fate, len(missing))
        if plan.admit is not None:
            self.submit((plan.admit,))
        is_replaced = plan.fate == SUBSTITUTE
        is_lost = is_replaced | (plan.fate == DROP)
        if is_lost.any():
            self.books.lost_weight += float(demand.weight[missing[is_lost]].sum())
        link_busy_us = self.link.busy_us(self.state.now_us)
        arrived_us = self._fetch(access, plan)
        on_device = access.is_hit.copy()
        on_device[missing[is_replaced | (plan.fate == FETCH)]] = True
        on_host, host_us = missing[plan.fate == HOST], 0.0
        if len(on_host):
            now_us, is_quiet = self.state.now_us, self.policies.prefetch.waits_for_host()
            link_busy_us = self.link.in_flight_us(now_us) if is_quiet else link_busy_us
            link_busy_us = max(link_busy_us, arrived_us - now_us)
            n_bytes = self.cache.bytes_of[demand.keys[on_host]]
            row_bytes = float(n_bytes @ demand.rows[on_host])
            host_us = self.machine.host_us(float(n_bytes.sum()), row_bytes, link_busy_us)
            if is_quiet:
                self.link.hold(now_us + host_us)
        return _Service(on_device, on_host, host_us, arrived_us)

    def _check_fates(self, fate: npt.NDArray[np.int8], n: int) -> None:
        """Experts without a place to run would cost nothing."""
        if len(fate) != n or fate.min() < 0 or fate.max() > SUBSTITUTE:
            raise PyspacError(
                f"the miss policy {self.policies.miss.name} gave the fates {fate.tolist()}: give each of "
                f"{n} experts one of {', '.join(name.name for name in Fate)}"
            )

    def _fetch(self, access: Access, plan: MissPlan) -> float:
        """Copy on demand; return when the last one is there."""
        keys = access.demand.keys[access.missing]
        is_fetch = plan.fate == FETCH
        at_us = self.state.now_us
        if not is_fetch.any():
            return at_us
        late = is_fetch & (self.cache.residency[keys] == LOADING)
        for key in keys[late].tolist():
            at_us = self.link.wait_for(key, at_us)
        self.cache.pin(keys[late])
        is_fetch &= ~late
        if not is_fetch.any():
            return at_us
        share = (np.ones(len(keys)) if plan.share is None else plan.share)[is_fetch]
        at_us = self.link.fetch(keys[is_fetch], share, at_us)
        self._keep(keys[is_fetch], share)
        if plan.share is not None:
            is_low = share < 1.0
            self.cache.has_low_bit |= bool(is_low.any())
            weight = access.demand.weight[access.missing[is_fetch]]
            self.books.low_bit_weight += float(weight[is_low].sum())
        return at_us

    def _keep(self, keys: Keys, share: Floats) -> None:
        """Give slots to experts that were fetched, as far as there are any."""
        kept = self.cache.admit(keys, share)
        self.books.bypassed += int(np.count_nonzero(~kept))
        self.cache.pin(keys[kept])

    # ---- the end

    def _finish(self, demand: Demand, service: _Service, start_us: float) -> LayerTimes:
        """Advance to the layer's end: the device's work, the host's, and what had to be waited for."""
        now_us, on_device = self.state.now_us, service.on_device
        size = float(self.geometry.expert_bytes[demand.il])
        n_device, device_rows = int(np.count_nonzero(on_device)), int(demand.rows[on_device].sum())
        device_us = self.machine.device_us(size * n_device, size * device_rows)
        device_end_us = now_us + device_us
        if service.arrived_us > now_us:  # the last copy's expert runs after it has come
            device_end_us = max(device_end_us, service.arrived_us + device_us / max(n_device, 1))
        end_us = max(device_end_us, now_us + service.host_us)
        self.books.stall_us += end_us - now_us - device_us
        self.books.device_us += device_us
        self.books.host_us += service.host_us
        self.state.now_us = end_us
        host_rows = int(demand.rows[service.on_host].sum())
        return LayerTimes(
            n_device, len(service.on_host), device_rows, host_rows, service.host_us, end_us - start_us
        )
