"""One training run: the clock, checkpoints, what Ctrl-C does. What learns, and from what, is a subclass's."""

from __future__ import annotations

import json
import math
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from tqdm import tqdm

from pyspac.errors import UsageError
from pyspac.train.accepted import describe

SEED: Final = 1
WARM_UP: Final = 0.03  # share of the run
LEAST_RATE: Final = 0.01  # of the highest learning rate
SAVE_EVERY_S: Final = 60


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long a training lasts, how fast it learns, and where it is kept."""

    checkpoint: Path  # log.jsonl lies beside it
    lr: float  # the highest
    minutes: float  # only of training
    steps: int | None = None  # of the optimiser, instead of minutes: the same on every machine
    report_every: float  # minutes


class Training(ABC):
    """Modules on their way: what a checkpoint holds, and what makes the next one."""

    def __init__(self, modules: Mapping[str, nn.Module], sizes: Mapping[str, Any], plan: Plan) -> None:
        """Go on from the checkpoint, if there is one; all parameters of the `modules` learn.

        `sizes`: what it must have in common with this run. Raises UsageError where it has not.
        """
        self.modules, self.sizes, self.plan = modules, dict(sizes), plan
        self.parameters = [parameter for module in modules.values() for parameter in module.parameters()]
        self.optim = torch.optim.AdamW(self.parameters, lr=plan.lr, betas=(0.9, 0.98), weight_decay=0.01)
        self.used_s, self.step, self.is_interrupted = 0.0, 0, False
        if plan.checkpoint.exists():
            self._resume()

    @abstractmethod
    def loss(self, generator: torch.Generator) -> Tensor:
        """Of one step, whose random choices are the generator's, which the step's number decides."""

    @abstractmethod
    def report(self) -> dict[str, list[float]]:
        """On held-out texts, as `accepted.report` makes it."""

    def saved_too(self) -> dict[str, Any]:
        """What else a checkpoint has."""
        return {}

    @property
    def progress(self) -> float:
        """0.0 .. 1.0, which is the end."""
        if self.plan.steps is not None:
            return min(1.0, self.step / self.plan.steps)
        return min(1.0, self.used_s / (self.plan.minutes * 60))

    def _resume(self) -> None:
        path = self.plan.checkpoint
        saved = load_checkpoint(path, self.parameters[0].device)
        if saved["sizes"] != self.sizes:
            raise UsageError(
                f"{path} was trained for {saved['sizes']}, and this run is for {self.sizes}; "
                "use another --work-dir or delete that file"
            )
        for name, module in self.modules.items():
            module.load_state_dict(saved[name])
        self.optim.load_state_dict(saved["optim"])
        self.used_s, self.step = saved["used_s"], saved["step"]

    def save(self) -> None:
        """A checkpoint, in place of the last one. Raises UsageError where the training has diverged."""
        if not all(parameter.isfinite().all() for parameter in self.parameters):
            raise UsageError(
                f"what was learned is not finite after {self.step} steps: give a smaller --lr than "
                f"{self.plan.lr:g}; the last checkpoint is as it was"
            )
        states = {name: module.state_dict() for name, module in self.modules.items()}
        state = {"sizes": self.sizes, "optim": self.optim.state_dict(), **states, **self.saved_too()}
        save_atomically(state | {"used_s": self.used_s, "step": self.step}, self.plan.checkpoint)

    def train(self) -> None:
        """Until the end or Ctrl-C; leaves a checkpoint either way. Raises UsageError where it diverges."""
        usual = signal.signal(signal.SIGINT, self.interrupt)
        next_save, next_report = (self.used_s + s for s in (SAVE_EVERY_S, self.plan.report_every * 60))
        try:
            with tqdm(total=1000, desc="training", mininterval=5, bar_format=_BAR) as bar:
                while self.progress < 1 and not self.is_interrupted:
                    start = time.monotonic()
                    loss = self.learn()
                    self.used_s += time.monotonic() - start
                    bar.set_postfix_str(f"step {self.step}, loss {loss:.3f}", refresh=False)
                    bar.update(int(1000 * self.progress) - bar.n)
                    if self.used_s >= next_save:
                        self.save()
                        next_save += SAVE_EVERY_S
                    if self.used_s >= next_report:
                        bar.write(self.log(self.report(), loss))
                        next_report += self.plan.report_every * 60
            self.save()
        finally:
            signal.signal(signal.SIGINT, usual)

    def interrupt(self, *_: object) -> None:
        self.is_interrupted = True

    def learn(self) -> float:
        """One step of the optimiser; its loss."""
        for group in self.optim.param_groups:
            group["lr"] = self.plan.lr * max(LEAST_RATE, min(self.progress / WARM_UP, 1.0, 1 - self.progress))
        loss = self.loss(torch.Generator().manual_seed(SEED + self.step))
        if not loss.isfinite():
            raise UsageError(
                f"the loss is {float(loss.detach())} after {self.step} steps: give a smaller --lr than "
                f"{self.plan.lr:g}; the same command goes on from the last checkpoint"
            )
        self.optim.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optim.step()
        self.step += 1
        return float(loss.detach())

    def log(self, row: dict[str, Any], loss: float) -> str:
        """Append to log.jsonl; the same as a line to read."""
        row = {"minutes": self.used_s / 60, "step": self.step, "loss": loss, **row}
        with (self.plan.checkpoint.parent / "log.jsonl").open("a") as log:
            log.write(json.dumps(row) + "\n")
        return f"{row['minutes']:.1f} min, step {self.step}, loss {loss:.3f}: {describe(row)}"


_BAR: Final = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


def check_positive(name: str, value: float) -> None:
    """Raise UsageError unless an option's value is a number above 0."""
    if not 0 < value < math.inf:
        raise UsageError(f"--{name} is {value:g}; it must be more than 0")


def save_atomically(data: object, path: Path) -> None:
    """`torch.save` that leaves either the old file or the new one, never half of one."""
    part = path.with_name(path.name + ".part")
    torch.save(data, part)
    part.replace(path)


def load_checkpoint(path: Path, device: Any) -> Any:
    """What `save_atomically` wrote. Raises UsageError for what is no such file, or was cut off."""
    try:
        return torch.load(path, map_location=device)
    except Exception as error:  # torch has no class of its own for this
        raise UsageError(f"{path} cannot be read ({error}); delete it, or give another --work-dir") from error


def is_out_of_memory(error: Exception) -> bool:
    """torch only has a class for a GPU's memory; the CPU's is a RuntimeError like any other."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def what_memory_said(error: Exception) -> str:
    """The first sentences of an error that `is_out_of_memory`."""
    return ". ".join(str(error).split(". ")[:2]) or type(error).__name__
