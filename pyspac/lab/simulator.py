"""One workload, one set of policies, one machine, one capacity in; the run's books out.

A step: draft window, then layer by layer what `layer.py` does; then the policies look back. All times are
predicted.
"""

from __future__ import annotations

from typing import Any, Final

from pyspac.lab.assembly import make_policies, make_scheduler, make_state
from pyspac.lab.books import Books
from pyspac.lab.cache import LOADING, RESIDENT
from pyspac.lab.demand import Tokens
from pyspac.lab.events import StepBegun, StepOver, StepTimes
from pyspac.lab.layer import LayerRunner
from pyspac.lab.look_ahead import make_look_ahead
from pyspac.lab.machine import Machine
from pyspac.lab.setup import Setup
from pyspac.lab.trace import TraceGeometry
from pyspac.lab.workload import Step, Workload

N_ROUTED_MAX: Final = 256  # SPAC_N_ROUTED_MAX: tokens of a prompt that the routing log holds


class Run:
    """One simulation: the state, the policies, and the loop over steps that moves both on."""

    def __init__(self, workload: Workload, setup: Setup, machine: Machine) -> None:
        """Make state and policies; ConfigError names what does not fit."""
        self.workload, self.machine = workload, machine
        self.state = make_state(workload, setup, machine)
        self.policies = make_policies(self.state)
        self.scheduler = make_scheduler(self.state, self.policies)
        self.ahead = make_look_ahead(self.state)
        self.layers = LayerRunner(self.state, self.policies, self.ahead)

    @property
    def books(self) -> Books:
        """What was counted so far."""
        return self.state.books

    def run(self) -> Books:
        """Run all steps; return the checked books."""
        state, books = self.state, self.books
        prompt_end_us = self._run_prompt()
        for index, step in enumerate(self.workload.steps):
            self._run_step(index, step)
        state.link.advance(state.now_us)
        books.total_us = state.now_us - prompt_end_us
        if self.workload.steps[0].n_emitted == 0:  # the prompt was a step
            books.total_us -= books.ttft_us
        elif self.workload.prompt is not None:
            books.ttft_us = prompt_us(self.workload.prompt, state.geometry, self.machine)
        books.check(state.cache.count(RESIDENT), state.cache.count(LOADING), state.cache.n_preloaded)
        return books

    def _run_prompt(self) -> float:
        """Let the scheduler see a prompt that is no step, layer by layer; return when it is over.

        It takes llama.cpp's path, which does not touch the cache; the scheduler hears of it as in the engine.
        """
        prompt, state = self.workload.prompt, self.state
        is_step = self.workload.steps[0] is prompt
        if prompt is None or is_step or self.scheduler is None or state.setup.is_cold:
            return 0.0
        layer_us = prompt_us(prompt, state.geometry, self.machine) / len(prompt.layers)
        for demand in prompt.layers:
            self.scheduler.see_prompt(demand, len(prompt.tokens), state.now_us)
            state.now_us += layer_us
            state.link.advance(state.now_us)
        self.scheduler.log_routing(prompt.tokens[-N_ROUTED_MAX:])
        self.scheduler.end_prompt(state.now_us)
        return state.now_us

    def _run_step(self, index: int, step: Step) -> None:
        state, start_us = self.state, self.state.now_us
        state.step = state.cache.step = index
        event = StepBegun(index, step.tokens, step.n_draft)
        self._look_ahead(step.tokens[:1])
        self.layers.submit(self.policies.prefetch.while_drafting(event))
        for predictor in self.ahead:
            predictor.while_drafting(event)
        state.now_us += step.n_draft * self.machine.draft_us
        times = StepTimes(draft_us=state.now_us - start_us)
        state.link.advance(state.now_us)
        if step.n_draft:
            self._look_ahead(step.tokens)
        state.cache.forward += 1
        state.link.begin_forward()
        served = []
        for asked in step.layers:
            demand, times.layers[asked.il] = self.layers.run(step, asked)
            served.append(demand)
        state.now_us += self.machine.step_us
        times.verify_us = state.now_us - start_us - times.draft_us
        state.link.advance(state.now_us)
        self._book_step(step, state.now_us - start_us)
        if self.scheduler is not None:
            self.scheduler.log_routing(step.tokens)
        self._look_back(StepOver(index, len(step.tokens), step.n_draft, step.n_emitted, served, times))

    def _look_ahead(self, tokens: Tokens) -> None:
        """Tell the scheduler what the next forward computes, as far as it is known."""
        if self.scheduler is not None:
            self.scheduler.look_ahead(tokens, self.state.now_us)

    def predictors(self) -> list[dict[str, Any]]:
        """Return what each predictor said, and what came of it."""
        of_scheduler = self.scheduler.predictors() if self.scheduler is not None else []
        return [*of_scheduler, *(predictor.to_dict() for predictor in self.ahead)]

    def _book_step(self, step: Step, step_us: float) -> None:
        if step.n_emitted == 0:
            self.books.ttft_us = step_us
        self.books.end_step(step.n_emitted, step.n_draft)

    def _look_back(self, event: StepOver) -> None:
        """Let the scheduler decide, tell the policies, then carry the plan out."""
        if self.scheduler is not None:
            self.scheduler.step(event)
        for policy in self.policies.all:
            policy.on_step_over(event)
        if self.scheduler is not None and self.policies.prefetch.obeys_scheduler:
            self.scheduler.apply(self.state.now_us)


def prompt_us(prompt: Step, geometry: TraceGeometry, machine: Machine) -> float:
    """Return the time of a prompt on stock's path, which does not touch the cache.

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
    policies = run.policies
    predictor = policies.prefetch.predictor
    return {
        "policy": setup.label or setup.eviction,
        **{policy.dimension: policy.name for policy in policies.all},
        "routing_setup": setup.routing,
        "capacity": setup.capacity,
        "n_slots": sum(run.state.group_slots),
        "k": workload.k,
        "machine": machine.name,
        "predictor": predictor.source if predictor else None,  # "recorded", or "assumed 0.85"
        **measures,
        "predictors": run.predictors(),
    }
