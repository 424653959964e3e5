"""Faults of the scheduler's process."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import Final

import psutil

from pyspac.server.backoff import LONG_LIFE_S
from tools.soak.faults.fault import Fault

SPARED: Final = 0.8  # of the young schedulers


class Kill(Fault):
    name, resource = "kill", "scheduler"
    what = "kills the scheduler (SIGKILL)"

    def apply(self) -> bool:
        scheduler = self.site.scheduler()
        if scheduler is None or self._spares(scheduler):
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            scheduler.kill()
        return True

    def _spares(self, scheduler: psutil.Process) -> bool:
        """Mostly a young one: back-off would leave no scheduler for the other faults."""
        try:
            age_s = time.time() - scheduler.create_time()
        except psutil.NoSuchProcess:
            return True
        return age_s < LONG_LIFE_S and self.rng.random() < SPARED


class Stop(Fault):
    name, resource = "stop", "scheduler"
    what = "stops the scheduler for a while (SIGSTOP, SIGCONT)"

    def apply(self) -> bool:
        scheduler = self.site.scheduler()
        if scheduler is None:
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            scheduler.send_signal(signal.SIGSTOP)
            try:
                self.site.wait(self.rng.uniform(0.3, 3))
            finally:
                scheduler.send_signal(signal.SIGCONT)
        return True
