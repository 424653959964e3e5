"""Settings and their checks."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from pyspac.engine.params import EngineParams
from pyspac.errors import ConfigError, EngineError, PyspacError
from pyspac.scheduler.config import ABLATIONS, ESTIMATORS, SchedulerConfig, parse_ablations


def test_defaults_are_the_papers_where_it_has_them() -> None:
    # MoE-SpAc 4.1: gamma = 8, lambda = 0.1, K = 4
    config = SchedulerConfig(estimator="spac")
    assert (config.n_draft_max, config.forgetting, config.effective_levels) == (8, 0.1, 4)


@pytest.mark.parametrize(("n_draft_max", "gamma"), [(0, 8), (1, 2), (2, 2), (4, 4), (8, 8), (16, 16)])
def test_gamma_is_the_draft_length_or_the_papers(n_draft_max: int, gamma: int) -> None:
    assert SchedulerConfig(n_draft_max=n_draft_max).gamma == gamma


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("estimator", "arc"), ("n_levels", 0), ("n_levels", 256), ("n_levels", True), ("forgetting", 1.5),
        ("n_draft_max", -1), ("ema_decay", 1.0), ("threshold", 0), ("threshold", "high"),
        ("byte_budget", -1), ("link_gb_s", 0.0), ("payback_steps", -1.0), ("static_steps", 0),
    ],
)  # fmt: skip
def test_bad_values_are_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field) as error:
        SchedulerConfig(**{field: value})  # type: ignore[arg-type]
    assert repr(value) in str(error.value)
    assert ": give " in str(error.value)
    assert error.value.exit_code == 2


def test_unknown_ablation_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"spekue.*specue"):
        SchedulerConfig(without=frozenset({"spekue"}))


def test_ablations_are_read_from_text() -> None:
    assert parse_ablations("sd, hetwb,,") == {"sd", "hetwb"}
    assert SchedulerConfig(without="prefetch,evict").without == {"prefetch", "evict"}  # type: ignore[arg-type]


def test_threshold_stays_within_the_levels() -> None:
    assert SchedulerConfig(estimator="spac", without={"hetwb"}).fixed_threshold == 2
    assert SchedulerConfig(without=frozenset({"hetwb", "specue"})).fixed_threshold == 1
    assert SchedulerConfig(estimator="spac", threshold=9).fixed_threshold == 4
    assert SchedulerConfig().fixed_threshold is None


def test_every_estimator_has_levels() -> None:
    assert all(1 <= SchedulerConfig(estimator=name).effective_levels <= 255 for name in ESTIMATORS)


def test_config_is_frozen_and_plain() -> None:
    config = SchedulerConfig(without=frozenset(ABLATIONS))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.estimator = "lru"  # type: ignore[misc]
    assert config.to_dict()["without"] == sorted(ABLATIONS)


@pytest.mark.parametrize(("field", "value"), [("host_mode", "both"), ("max_batch", 0), ("n_threads", -1)])
def test_engine_params_are_checked(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        EngineParams(**{field: value})  # type: ignore[arg-type]


def test_settings_need_no_native_library() -> None:
    """Nothing that loads the engine comes with settings, boards and the lab: they repeat no limit of it."""
    modules = (
        "scheduler.config",
        "scheduler.scheduler",
        "forward.options",
        "engine.board",
        "server.options",
        "lab.simulator",
    )
    imports = ", ".join(f"pyspac.{name}" for name in modules)
    code = f"import sys, {imports}; print([name for name in sys.modules if '_native' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert EngineParams(n_threads=10_000, max_batch=10_000).max_batch == 10_000


def test_engine_errors_keep_status_and_text() -> None:
    error = EngineError(2, "the pool of 9 GiB does not fit: pass a smaller --cache")
    assert isinstance(error, PyspacError)
    assert (error.status, error.exit_code, str(error)) == (2, 2, error.text)
    assert EngineError(4, "").exit_code == 1
    assert "status 4" in str(EngineError(4, ""))
