"""What policies may know: events tell the past, the view the present, and only bounds see the future."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
from tiny import make_trace, observe, one_layer

from pyspac.errors import ConfigError
from pyspac.lab.assembly import make_state
from pyspac.lab.future import NEVER
from pyspac.lab.machine import PRESETS
from pyspac.lab.policy import DIMENSIONS
from pyspac.lab.registry import find, names
from pyspac.lab.setup import Setup
from pyspac.lab.simulator import Run
from pyspac.lab.view import OracleView, View
from pyspac.lab.workload import make_workload

LAB = Path(__file__).resolve().parents[2] / "pyspac" / "lab"
FILES = sorted(path for dimension in DIMENSIONS for path in (LAB / dimension).glob("[a-z]*.py"))
POLICIES = [(dimension, name) for dimension in DIMENSIONS for name in names(dimension)]
# a run's own parts, which would let a policy look where it must not, or change what it sees
CLOSED = {
    f"pyspac.lab.{name}" for name in ("state", "simulator", "layer", "assembly", "workload", "cache", "link")
}
CLAIRVOYANT = {"belady", "foresight"}


def view_of(sequence: str, kind: type[View] = View) -> View:
    state = make_state(
        make_workload(one_layer(sequence), 0), Setup(eviction="lru", capacity="2"), PRESETS["instant"]
    )
    return kind(state)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_policy_knows_events_and_a_view_alone(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported & CLOSED == set()
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert used & {"getattr", "hasattr", "isinstance", "setattr"} == set()
    private = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "_state"
    }
    assert private == set()
    sees_future = any(isinstance(node, ast.Attribute) and node.attr == "future" for node in ast.walk(tree))
    assert sees_future == (path.stem in CLAIRVOYANT)


@pytest.mark.parametrize(("dimension", "name"), POLICIES)
def test_only_bounds_are_clairvoyant(dimension: str, name: str) -> None:
    assert find(dimension, name).is_clairvoyant == (name in CLAIRVOYANT)


def test_only_the_oracle_has_a_future() -> None:
    # a is used at 0 and 2, b at 1; after that never
    assert not hasattr(view_of("aba"), "future")
    view = view_of("aba", OracleView)
    assert isinstance(view, OracleView)
    assert view.future.first_use[:2].tolist() == [0, 1]
    assert [view.future.next_use(step, 0).tolist() for step in range(3)] == [[2], [NEVER], [NEVER]]


def test_a_view_cannot_be_written() -> None:
    view = view_of("ab")
    arrays = (
        view.layer_of, view.cache.residency, view.cache.last_used, view.cache.share, view.cache.bytes_of,
        view.cache.group_of, view.decision.utility, view.decision.tau,
    )  # fmt: skip
    for array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_view_shows_how_things_stand() -> None:
    # two slots, "abc": c has taken a's
    run = observe(one_layer("abc"), 2, eviction="lru")
    view = View(run.state)
    assert view.cache.is_resident(np.arange(3)).tolist() == [False, True, True]
    assert (view.cache.n_free(0), sorted(view.cache.owners(0).tolist()), view.step) == (0, [1, 2], 2)
    assert (view.link.n_waiting, view.link.free_in_us) == (0, 0.0)


@pytest.mark.parametrize("policies", [{"eviction": "belady"}, {"eviction": "lru", "prefetch": "foresight"}])
def test_nobody_knows_the_future_of_another_routing(policies: dict[str, str]) -> None:
    trace = make_trace([[[0]], [[1]]], logits=np.zeros((2, 1, 8), np.float16))
    with pytest.raises(ConfigError, match="recorded routing"):
        observe(trace, 2, routing="cache-aware", **policies)


def test_the_scheduler_counts_what_was_served() -> None:
    # the resident 0 stands in for 1 in the second token, so that 0 was used twice
    logits = np.full((2, 1, 8), 1.0, np.float16)
    logits[0, 0, 0], logits[1, 0, :2] = 9.0, (8.5, 9.0)
    trace = make_trace([[[0]], [[1]]], logits=logits)
    run = observe(trace, 4, eviction="ema", miss="fetch", routing="cache-aware:lambda=0.25")
    assert run.scheduler is not None
    assert run.scheduler.board.counts[0, :2].tolist() == [2, 0]


@pytest.mark.parametrize("prefetch", ["draft-gate:accuracy=1", "utility", "history"])
def test_nothing_comes_to_a_fixed_allocation(prefetch: str) -> None:
    # one slot of 8 MiB layers: static has no room for a layer, and stays empty
    trace = make_trace([[[0], [1]]] * 6)
    workload = make_workload(trace, 2, accept=1.0)
    run = Run(workload, Setup(eviction="static", prefetch=prefetch, capacity="4"), PRESETS["instant"])
    assert run.run().loads == 0
