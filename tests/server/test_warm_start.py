"""pyspac.server.warm_start: what is kept, what is refused, and what a restarted server covers at once."""

from __future__ import annotations

import logging
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import ONE_THREAD, TARGET, Serve, complete, wait_for

from pyspac.engine.board import Board, BoardGeometry, LocalBoard, Residency
from pyspac.scheduler.config import ESTIMATORS, SchedulerConfig
from pyspac.scheduler.scheduler import Scheduler
from pyspac.server import log
from pyspac.server.model_identity import cache_folder, model_hash
from pyspac.server.warm_start import UtilityStore, open_store


def board(n_expert: int = 8) -> LocalBoard:
    return LocalBoard(BoardGeometry.uniform(n_layer=3, n_expert=n_expert, n_expert_used=2, n_slots=6))


def taught(estimator: str, **settings: Any) -> Scheduler:
    """A scheduler after some steps of random routing."""
    local, rng = board(), np.random.default_rng(0)
    scheduler = Scheduler(local, SchedulerConfig(estimator=estimator, **settings))
    for _ in range(20):
        local.counts[np.arange(3)[:, None], rng.integers(0, 4, (3, 2))] += 1
        local.counters["n_forward"] += 1
        scheduler.step()
    return scheduler


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_estimator_goes_on_where_it_was(tmp_path: Path, estimator: str) -> None:
    store, before = UtilityStore(tmp_path / "u" / "m.npz"), taught(estimator)
    store.keep(before)
    after = Scheduler(board(), SchedulerConfig(estimator=estimator))
    assert store.recall(after)
    assert np.array_equal(after.estimator.utility, before.estimator.utility)
    counts = np.zeros((3, 8), np.uint32)
    counts[:, 5] = 3
    for scheduler in (before, after):
        scheduler.estimator.update(counts, 2)
    assert np.array_equal(after.estimator.utility, before.estimator.utility)
    assert [path.name for path in (tmp_path / "u").iterdir()] == ["m.npz"]


def test_what_was_found_about_copies_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For this machine and this many slots; nothing is, before it was measured."""
    store, before = UtilityStore(tmp_path / "m.npz"), taught("ema")
    assert before.fallback is not None
    store.keep(before)
    assert store.recall(fresh := taught("ema"))
    assert fresh.fallback is not None
    assert fresh.fallback.gain is None
    before.fallback.chosen, before.fallback.gain = "frozen", 0.125
    store.keep(before)
    assert store.recall(after := taught("ema"))
    assert after.fallback is not None
    assert after.fallback.gain == 0.125
    assert after.fallback.way != "frozen", "the device has to be filled first"
    monkeypatch.setattr("platform.node", lambda: "another")
    assert store.recall(other := taught("ema"))
    assert other.fallback is not None
    assert other.fallback.gain is None
    assert store.recall(taught("ema", without=frozenset({"fallback"})))


def test_a_predictor_goes_on_where_it_was(tmp_path: Path) -> None:
    """Its table is kept with the utilities; who has none, or does not look ahead, starts without."""
    local, config = board(), SchedulerConfig(predict=("token",))
    before = Scheduler(local, config)
    local.counts[:, :2] += 1
    local.record_routing(np.array([7], np.int32), np.full((1, 3, 2), [0, 1], np.uint16))
    before.step()
    store = UtilityStore(tmp_path / "m.npz")
    store.keep(before)
    after = Scheduler(board(), config)
    assert store.recall(after)
    for scheduler in (before, after):
        assert scheduler.foresight is not None
        assert scheduler.foresight.predictor.predict(np.array([7], np.int32)).sum() == 6
    assert store.recall(Scheduler(board()))
    store.keep(taught("ema"))
    fresh = Scheduler(board(), config)
    assert store.recall(fresh)
    assert fresh.foresight is not None
    assert not fresh.foresight.predictor.predict(np.array([7], np.int32)).any()


def test_the_first_decision_loads_what_was_useful(tmp_path: Path) -> None:
    store = UtilityStore(tmp_path / "m.npz")
    store.keep(taught("ema"))
    local = board()
    scheduler = Scheduler(local)
    assert store.recall(scheduler)
    plan = scheduler.step()
    assert plan.n_load == 6  # all slots
    assert set(plan.load % 8) <= {0, 1, 2, 3}


def test_nothing_to_recall(tmp_path: Path) -> None:
    assert not UtilityStore(tmp_path / "m.npz").recall(Scheduler(board()))


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut off"])
def test_a_damaged_file_is_no_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.npz"
    path.write_bytes(content)
    assert not UtilityStore(path).recall(Scheduler(board()))


def test_another_estimator_or_geometry_is_not_taken(tmp_path: Path) -> None:
    store = UtilityStore(tmp_path / "m.npz")
    store.keep(taught("ema"))
    assert not store.recall(Scheduler(board(), SchedulerConfig(estimator="lfu")))
    assert not store.recall(Scheduler(board(), SchedulerConfig(n_levels=3)))
    other = Scheduler(board(n_expert=9))
    assert not store.recall(other)
    assert not other.estimator.utility.any()


OLD_AND_NEW_SETTINGS = [
    ("ema", {"ema_decay": 0.5}, {"ema_decay": 0.9}),
    ("spac", {"forgetting": 0.5}, {"forgetting": 0.25}),
    ("static", {"static_steps": 5}, {"static_steps": 30}),
]


@pytest.mark.parametrize(("estimator", "old", "new"), OLD_AND_NEW_SETTINGS)
def test_a_setting_that_has_changed_is_not_overridden(
    tmp_path: Path, estimator: str, old: dict[str, Any], new: dict[str, Any]
) -> None:
    """What was learned goes on under the new settings, as if they had changed on the way."""
    store, before = UtilityStore(tmp_path / "m.npz"), taught(estimator, **old)
    store.keep(before)
    after = Scheduler(board(), SchedulerConfig(estimator=estimator, **new))
    fresh = settings_of(Scheduler(board(), SchedulerConfig(estimator=estimator, **new)))
    assert store.recall(after)
    assert np.array_equal(after.estimator.utility, before.estimator.utility)
    assert settings_of(after) == fresh
    counts = np.zeros((3, 8), np.uint32)
    counts[:, 5] = 40
    assert after.estimator.update(counts, 40)[0, 5] > 0, "it still learns"


def settings_of(scheduler: Scheduler) -> dict[str, Any]:
    """The estimator's numbers and flags that are not learned."""
    estimator = scheduler.estimator
    learned = {"n_updates", *estimator.state()}
    numbers = {name: value for name, value in vars(estimator).items() if isinstance(value, int | float)}
    return {name: value for name, value in numbers.items() if name.lstrip("_") not in learned}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_state_is_not_the_estimators_own_memory(estimator: str) -> None:
    scheduler = taught(estimator)
    state = scheduler.estimator.state()
    kept = {name: value.copy() for name, value in state.items()}
    scheduler.estimator.update(np.full((3, 8), 9, np.uint32), 9)
    assert all(np.array_equal(state[name], kept[name]) for name in state)
    assert all(value.shape in ((), (3, 8)) for value in state.values())


def test_fixed_boundaries_are_a_setting(tmp_path: Path) -> None:
    store = UtilityStore(tmp_path / "m.npz")
    store.keep(taught("spac", without=frozenset({"adabc"})))
    adaptive = Scheduler(board(), SchedulerConfig(estimator="spac"))
    assert not store.recall(adaptive)
    fixed = Scheduler(board(), SchedulerConfig(estimator="spac", without=frozenset({"adabc"})))
    assert store.recall(fixed)


def test_a_file_of_an_older_format_is_said_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Format 1 held whatever the estimator had, its settings included."""
    monkeypatch.setattr(logging.getLogger(log.NAME), "propagate", True)  # a command may have ended that
    path, scheduler = tmp_path / "m.npz", taught("ema")
    arrays = {f"state.{name}": value for name, value in scheduler.estimator.state().items()}
    header = {"format": 1, "estimator": "ema", "n_levels": scheduler.config.effective_levels}
    np.savez(path, **header, **arrays, **{"state.decay": 0.1})
    store = UtilityStore(path)
    with caplog.at_level(logging.WARNING, log.NAME):
        assert not store.recall(Scheduler(board()))
    assert "has format 1, this run needs 2; it is replaced at the end" in caplog.text
    store.keep(scheduler)
    assert store.recall(Scheduler(board()))


def test_the_hash_is_of_the_content(tmp_path: Path) -> None:
    content = TARGET.read_bytes()
    copy, changed = tmp_path / "copy.gguf", tmp_path / "changed.gguf"
    copy.write_bytes(content)
    changed.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert model_hash(copy) == model_hash(TARGET)
    assert model_hash(changed) != model_hash(TARGET)
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for part in parts:
        part.write_bytes(content)
    first = model_hash(parts[0])
    parts[1].write_bytes(content[:-1])
    assert model_hash(parts[0]) != first


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPAC_CACHE_DIR", "/some/where")
    assert cache_folder() == Path("/some/where")
    monkeypatch.delenv("PYSPAC_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/pyspac")
    assert open_store(None) is None
    assert open_store(Path("/no/such/model.gguf")) is None


def coverage(serve: Serve) -> float:
    """Share of one answer's activations whose expert was on the device."""
    with Board.open(serve.board) as shared:
        before = shared.counters.copy()[0]
        complete(serve.port, 96)
        after = shared.counters.copy()[0]
    n_hit, n_miss, n_late = (
        int(after[name] - before[name]) for name in ("n_hit_rows", "n_miss_rows", "n_late_rows")
    )
    return n_hit / (n_hit + n_miss + n_late)


def wait_until_full(serve: Serve) -> None:
    with Board.open(serve.board) as shared:
        wait_for(
            "experts", lambda: np.count_nonzero(shared.residency == Residency.RESIDENT) >= shared.n_slots
        )


def test_the_first_answer_after_a_restart_is_as_well_covered(tmp_path: Path) -> None:
    """Without a warm start the first answer is not: else this would show nothing. Nor would it with seeding.

    How far residency follows within an answer depends on when the scheduler gets a core, so equal answers
    are not covered alike: the first one after the restart must not fall behind the least of the last ones.
    """
    passed = ("-np", "1", *ONE_THREAD)
    with Serve(tmp_path, "--policy", "without=['prompt']", passed=passed) as serve:
        cold = coverage(serve.wait_ready())
        last = [coverage(serve) for _ in range(4)][1:]
        assert serve.stop() == 0
    saved = list((tmp_path / "cache" / "utilities").iterdir())
    assert [path.suffix for path in saved] == [".npz"]
    with Serve(tmp_path, "--policy", "without=['prompt']", passed=passed) as serve:
        wait_until_full(serve.wait_ready())
        warm = coverage(serve)
    assert warm >= min(last) - 0.05
    assert warm > cold


def test_nothing_is_written_if_it_is_not_wanted(tmp_path: Path) -> None:
    with Serve(tmp_path, "--no-warm-start") as serve:
        complete(serve.wait_ready().port, 8)
        assert serve.stop() == 0
    assert not (tmp_path / "cache").exists()


# ---- several servers, one file


def taught_expert(expert: int) -> Scheduler:
    """A scheduler that has seen one expert in use, in every layer."""
    local = board()
    scheduler = Scheduler(local, SchedulerConfig(estimator="ema"))
    for _ in range(20):
        local.counts[:, expert] += 1
        local.counters["n_forward"] += 1
        scheduler.step()
    return scheduler


def keep_in_turn(path: Path, expert: int, n_rounds: int, barrier: Any) -> None:
    """A server's life: it learns of one expert, and saves whenever the others do."""
    store, scheduler = UtilityStore(path), taught_expert(expert)
    for _ in range(n_rounds):
        barrier.wait(60)
        store.keep(scheduler)


def test_servers_that_save_at_once_keep_what_all_learned(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    path, n_servers = tmp_path / "u" / "m.npz", 3
    barrier = context.Barrier(n_servers + 1)
    servers = [
        context.Process(target=keep_in_turn, args=(path, expert, 20, barrier)) for expert in range(n_servers)
    ]
    for server in servers:
        server.start()
    for i in range(20):
        barrier.wait(60)
        if i:  # whenever one looks, there is a whole file
            assert UtilityStore(path).recall(Scheduler(board(), SchedulerConfig(estimator="ema")))
    for server in servers:
        server.join(60)
        assert server.exitcode == 0
    with np.load(path) as archive:
        assert (archive["state.sum"][:, :n_servers] > 0).all()
        assert not archive["state.sum"][:, n_servers:].any()
    assert [file.name for file in path.parent.iterdir()] == ["m.npz"]


def test_a_server_alone_saves_what_it_knows_itself(tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    UtilityStore(path).keep(taught_expert(1))
    store, scheduler = UtilityStore(path), taught_expert(2)
    assert store.recall(Scheduler(board(), SchedulerConfig(estimator="ema")))
    store.keep(scheduler)
    with np.load(path) as archive:
        assert np.array_equal(archive["state.sum"], scheduler.estimator.state()["sum"])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_what_two_learned_is_averaged(tmp_path: Path, estimator: str) -> None:
    path, mine = tmp_path / "m.npz", taught(estimator)
    UtilityStore(path).keep(Scheduler(board(), SchedulerConfig(estimator=estimator)))  # knows nothing yet
    UtilityStore(path).keep(mine)
    after = Scheduler(board(), SchedulerConfig(estimator=estimator))
    assert UtilityStore(path).recall(after)
    half = np.rint(mine.estimator.utility / 2)
    assert np.array_equal(after.estimator.utility, half)


def test_another_estimators_file_is_replaced(tmp_path: Path) -> None:
    path, mine = tmp_path / "m.npz", taught("ema")
    UtilityStore(path).keep(taught("lru"))
    UtilityStore(path).keep(mine)
    after = Scheduler(board(), SchedulerConfig(estimator="ema"))
    assert UtilityStore(path).recall(after)
    assert np.array_equal(after.estimator.utility, mine.estimator.utility)


def test_tokens_that_two_learned_of_are_both_kept(tmp_path: Path) -> None:
    path, config = tmp_path / "m.npz", SchedulerConfig(predict=("token",))
    for token, experts in ((7, [0, 1]), (9, [2, 3])):
        local = board()
        scheduler = Scheduler(local, config)
        local.counts[:, experts] += 1
        local.record_routing(np.array([token], np.int32), np.full((1, 3, 2), experts, np.uint16))
        scheduler.step()
        UtilityStore(path).keep(scheduler)
    after = Scheduler(board(), config)
    assert UtilityStore(path).recall(after)
    assert after.foresight is not None
    for token, first in ((7, 0), (9, 2)):
        assert after.foresight.predictor.predict(np.array([token], np.int32))[:, first].all()
