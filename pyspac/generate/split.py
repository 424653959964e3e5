"""The split of one context: the engine attached to it, and the scheduler that runs between its steps.

In: a target context and the options. Out: a `Split`, which is the decode loop's `StepHook` and knows the
figures of what happened. A draft model's context never gets one. Without a device there is nothing to place,
so no scheduler: on a small model it would take a quarter of a step. Where experts are on disk a predictor may
run by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

from pyspac.engine.ahead import ahead_dict, in_engine
from pyspac.engine.board_figures import coverage, experts_dict, time_us
from pyspac.engine.device_stats import DeviceFigures, read_devices
from pyspac.engine.engine import Engine
from pyspac.engine.step import StepRecord
from pyspac.engine.tier import tier_dict
from pyspac.engine.values import read_device_kind
from pyspac.generate.options import RunOptions
from pyspac.scheduler.read_ahead import ReadAhead, make_read_ahead
from pyspac.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from pyspac.engine.devices import Device
    from pyspac.generate.llama import Context


class Split:
    """An attached engine with its scheduler; close it before the context."""

    def __init__(
        self, ctx_ptr: int | None, device: Device, options: RunOptions, ram_mib: float | None = None
    ) -> None:
        """`ctx_ptr`: a llama_context. Raises EngineError if the device fails or no layer can be split."""
        assert ctx_ptr is not None
        self._predict = options.predict
        self._prompt_us: dict[str, int] = {}
        self.prompt_read_bytes = 0  # of experts on disk, until the last prompt was computed
        params = options.engine_params(_engine_device(device, options), ram_mib)
        self.engine = Engine.attach(ctx_ptr, params)
        with ExitStack() as on_error:
            on_error.callback(self.engine.close)  # an engine must not outlive its context
            self.info = self.engine.info()
            self.scheduler = None if options.is_host_only else self._new_scheduler(options)
            self.read_ahead: ReadAhead | None = None
            if options.is_host_only and ram_mib is not None:
                self.read_ahead = make_read_ahead(self.engine.board, options.predict)
            self._decide()
            on_error.pop_all()

    def why_failed(self) -> str:
        """What the engine knows of a forward that failed."""
        return self.engine.tier().error

    def watch_draft(self, draft: Context) -> None:
        """Predict with the draft model's router inputs; EngineError if the two models do not fit."""
        assert draft.ptr is not None
        self.engine.watch_draft(draft.ptr)

    def _new_scheduler(self, options: RunOptions) -> Scheduler:
        return Scheduler(self.engine.board, options.scheduler_config())

    def n_draft_limit(self) -> int | None:
        """The board's draft-length limit of this sequence; None: none."""
        if self.scheduler is None:
            return None
        limit = int(self.engine.board.n_draft_max[0])
        return None if limit < 0 else limit

    def after_prompt(self) -> None:
        if self.scheduler is not None:
            self.engine.end_forward()
        self._prompt_us = {name: self._time_us(name) for name in ("host_us", "device_us")}
        self.prompt_read_bytes = self.engine.tier().read_bytes
        self._decide()

    def after_step(self, record: StepRecord) -> None:
        if self.scheduler is not None:
            self.engine.end_forward()
            self.engine.record_step(record)
        self._decide()

    def look_ahead(self, tokens: Sequence[int]) -> None:
        if self.scheduler is not None and self.scheduler.foresight is not None:
            self.scheduler.look_ahead(tokens)
            self.engine.apply()
        if self.read_ahead is not None:
            self.read_ahead.look_ahead(tokens)
            self.engine.apply()

    def _decide(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()
            self.engine.apply()  # now, so that copies run while the next tokens are drafted
        if self.read_ahead is not None:
            self.read_ahead.learn()

    def experts_dict(self) -> dict[str, int]:
        """`experts` of the `--json` object."""
        return experts_dict(self.engine.board)

    def devices(self) -> list[DeviceFigures]:
        """What each device holds and did, in the order of their names; none without a device."""
        return read_devices(self.engine.board)

    def tier_dict(self) -> dict[str, Any] | None:
        """`tier` of the `--json` object: experts on disk, in memory a part of them; None: no such tier."""
        return tier_dict(asdict(self.engine.tier()))

    def layers_dict(self) -> dict[str, Any]:
        """`layers` of the `--json` object."""
        return {
            "split": self.info.n_layer_split,
            "declined": dict(Counter(self.engine.declined().values())),
            "unpinned": self.info.n_layer_unpinned,
        }

    def scheduler_dict(self) -> dict[str, Any]:
        """`scheduler` of the `--json` object; empty without one."""
        if self.scheduler is None:
            return {}
        stats = self.scheduler.stats()
        return {
            "estimator": self.scheduler.config.estimator,
            "step_us_p50": stats.step_p50_us,
            "step_us_p99": stats.step_p99_us,
            "copies": self.scheduler.fallback.to_dict() if self.scheduler.fallback else None,
            "whole": self.scheduler.layers.to_dict() if self.scheduler.layers.is_on else None,
        }

    def predictors_list(self) -> list[dict[str, Any]]:
        """`predictors` of the `--json` object: what each said, and what came of it."""
        foresight = self.scheduler.foresight if self.scheduler is not None else None
        return [
            *([] if foresight is None else [foresight.to_dict()]),
            *([] if self.read_ahead is None else [self.read_ahead.to_dict()]),
            *(ahead_dict(self.engine.board, name) for name in in_engine(self._predict)),
        ]

    def coverage(self) -> float | None:
        return coverage(self.engine.board)

    def steps_us(self, name: str) -> int:
        """Sum over layers of `host_us` or `device_us` of spac_layer_stats, since the last prompt."""
        return self._time_us(name) - self._prompt_us.get(name, 0)

    def _time_us(self, name: str) -> int:
        return time_us(self.engine.board, name)

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def _engine_device(device: Device, options: RunOptions) -> str:
    if options.is_host_only:
        return "none"
    if device.is_cpu:
        return "emulated"
    # of "auto" the engine leaves those out that llama.cpp gave no MoE layer
    return "auto" if device.parts and read_device_kind(options.device) == "auto" else device.name
