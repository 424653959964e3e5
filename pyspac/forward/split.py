"""The split of one context: the engine attached to it, and the scheduler, which has its turn between passes.

So what is measured is placed as a server would place it, in the same order each time. Without a device there
is nothing to place, so no scheduler.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from pyspac.engine.engine import Engine
from pyspac.engine.step import StepRecord
from pyspac.engine.values import read_device_kind
from pyspac.forward.options import ForwardOptions
from pyspac.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from pyspac.engine.devices import Device


class Split:
    """An attached engine with its scheduler; close it before the context."""

    def __init__(
        self, ctx_ptr: int | None, device: Device, options: ForwardOptions, ram_bytes: int | None = None
    ) -> None:
        """`ctx_ptr`: a llama_context. Raises EngineError if the device fails or no layer can be split."""
        assert ctx_ptr is not None
        self.engine = Engine.attach(ctx_ptr, options.engine_params(engine_device(device, options), ram_bytes))
        with ExitStack() as on_error:
            on_error.callback(self.engine.close)  # an engine must not outlive its context
            self.info = self.engine.info()
            self.scheduler = None if options.is_host_only else Scheduler(self.engine.board, options.scheduler)
            self._decide()
            on_error.pop_all()

    def why_failed(self) -> str:
        """What the engine knows of a forward that failed."""
        return self.engine.tier().error

    def after_prompt(self) -> None:
        """The context holds a new text."""
        if self.scheduler is not None:
            self.engine.end_forward()
        self._decide()

    def after_step(self, record: StepRecord) -> None:
        """The text went on by one step."""
        if self.scheduler is not None:
            self.engine.end_forward()
            self.engine.record_step(record)
        self._decide()

    def _decide(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()
            self.engine.apply()  # now, so that copies run before the next step

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def engine_device(device: Device, options: ForwardOptions) -> str:
    """The engine's name of the device that was found."""
    if options.is_host_only:
        return "none"
    if device.is_cpu:
        return options.device if read_device_kind(options.device) == "emulated" else "emulated"
    # of "auto" the engine leaves those out that llama.cpp gave no MoE layer
    return "auto" if device.parts and read_device_kind(options.device) == "auto" else device.name
