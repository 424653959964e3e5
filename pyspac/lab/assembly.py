"""A setup in, its four policies and its scheduler out; what does not go together is refused here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pyspac.errors import ConfigError, UsageError
from pyspac.lab.machine import Machine
from pyspac.lab.policy import Dimension, Eviction, Miss, Policy, Prefetch, Routing
from pyspac.lab.registry import find
from pyspac.lab.setup import Setup, capacity_bytes, parse
from pyspac.lab.shipping import SchedulerSetup, ShippingScheduler
from pyspac.lab.state import RunState
from pyspac.lab.view import OracleView, View
from pyspac.lab.workload import Workload
from pyspac.scheduler.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class Policies:
    """One of each dimension."""

    eviction: Eviction
    prefetch: Prefetch
    miss: Miss
    routing: Routing

    @property
    def all(self) -> tuple[Policy, ...]:
        """All four."""
        return (self.eviction, self.prefetch, self.miss, self.routing)


def make_state(workload: Workload, setup: Setup, machine: Machine) -> RunState:
    """Return the state that a run begins with; ConfigError if the capacity is unreadable or too small."""
    eviction: type[Eviction] = find("eviction", parse(setup.eviction)[0])
    total = workload.trace.geometry.total_bytes
    room = total if eviction.ignores_capacity else capacity_bytes(setup.capacity, total)
    return RunState(workload, setup, machine, room)


def make_policies(state: RunState) -> Policies:
    """Return the policies of a run and fill its cache; ConfigError names what does not fit."""
    setup = state.setup
    eviction: Eviction = _make(state, "eviction", setup.eviction, "")
    policies = Policies(
        eviction,
        _make(state, "prefetch", setup.prefetch, eviction.default_prefetch),
        _make(state, "miss", setup.miss, eviction.default_miss),
        _make(state, "routing", setup.routing, "standard"),
    )
    _check(policies, setup)
    state.cache.eviction = eviction
    state.cache.preload(eviction.preload())
    return policies


def _make(state: RunState, dimension: Dimension, text: str, default: str) -> Any:
    """Return one policy; only a clairvoyant one sees the future."""
    name, knobs = parse(default if text == "auto" else text)
    cls: type[Policy] = find(dimension, name)
    if cls.needs_logits and state.trace.logits is None:
        raise ConfigError(f"--{dimension}", name, "a trace with router logits (pyspac trace --logits)")
    return cls(OracleView(state) if cls.is_clairvoyant else View(state), knobs)


def _check(policies: Policies, setup: Setup) -> None:
    clairvoyant = [policy.name for policy in policies.all if policy.is_clairvoyant]
    if policies.routing.is_lossy and clairvoyant:
        allowed = f"standard, as {clairvoyant[0]} only knows the future of the recorded routing"
        raise ConfigError("--routing", setup.routing, allowed)
    if policies.eviction.needs_host() and not policies.miss.leaves_to_host():
        raise ConfigError("--miss", setup.miss, "host, as cold_on_host leaves residents to it")


def make_scheduler(state: RunState, policies: Policies) -> ShippingScheduler | None:
    """Return the shipping scheduler as the policies ask for it; None if none of them does.

    Where nothing ever moves there is nothing to schedule. UsageError for predictors without effect.
    """
    wanted = policies.eviction.scheduler_setup()
    if state.setup.predict and (wanted is None or not policies.prefetch.obeys_scheduler):
        raise UsageError(
            f"--predict {','.join(state.setup.predict)} speaks to pyspac's scheduler, which this run lacks: "
            "give an estimator such as --eviction ema, and --prefetch auto"
        )
    if policies.eviction.is_fixed:
        return None
    if wanted is None:
        if not policies.prefetch.obeys_scheduler:
            return None
        wanted = SchedulerSetup(SchedulerConfig(n_draft_max=state.workload.k))
    state.decision.is_obeyed = policies.prefetch.obeys_scheduler
    # misses that are fetched take the free slots themselves
    state.decision.fills = (
        state.decision.is_obeyed
        and policies.miss.leaves_to_host()
        and not {"prefetch", "prompt"} & state.setup.without
    )
    config = replace(wanted.config, without=state.setup.without, predict=state.setup.predict)
    return ShippingScheduler(state, replace(wanted, config=config))
