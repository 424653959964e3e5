"""Threads that apply faults, and count what came of them."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from tools.soak.faults.fault import Fault, FaultError


@dataclass(slots=True)
class FaultCount:
    """What came of one kind of fault."""

    n_applied: int = 0
    n_idle: int = 0  # there was nothing to do
    n_failed: int = 0
    skipped: str | None = None  # why it is not applied at all


class FaultDealer:
    """Threads that apply faults at random times; each comes once before any comes again."""

    def __init__(
        self, faults: list[Fault], stop: threading.Event, *, n: int, pause_s: float, seed: int
    ) -> None:
        """`n` threads, pauses of `pause_s` on average."""
        self.counts = {fault.name: FaultCount(skipped=fault.why_not()) for fault in faults}
        self.failures: list[str] = []
        self._faults = [fault for fault in faults if not self.counts[fault.name].skipped]
        self._resources = {fault.resource: threading.Lock() for fault in faults}
        self._rng = random.Random(f"{seed}-dealer")
        self._deck: list[Fault] = []
        self._lock = threading.Lock()
        self._stop = stop
        self._pause_s = pause_s
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(n)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """After the event was set: until the last fault is over."""
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set() and self._faults:
            with self._lock:
                pause_s = self._rng.expovariate(1 / self._pause_s)
            self._stop.wait(pause_s)
            fault = self._deal()
            if fault is not None and not self._stop.is_set():
                with self._releasing(fault):
                    self.apply(fault)

    @contextlib.contextmanager
    def _releasing(self, fault: Fault) -> Iterator[None]:
        try:
            yield
        finally:
            self._resources[fault.resource].release()

    def _deal(self) -> Fault | None:
        """The next of the deck whose resource is free, which is then taken; None: all wait."""
        with self._lock:
            if not self._deck:
                self._deck = self._rng.sample(self._faults, len(self._faults))
            for fault in self._deck:
                if self._resources[fault.resource].acquire(blocking=False):
                    self._deck.remove(fault)
                    return fault
        return None

    def apply(self, fault: Fault) -> None:
        """Apply one, and book what came."""
        count = self.counts[fault.name]
        try:
            if fault.apply():
                count.n_applied += 1
            else:
                count.n_idle += 1
        except Exception as error:  # of ours as well: a fault that breaks must not end the soak unseen
            count.n_failed += 1
            text = str(error) if isinstance(error, FaultError) else f"{type(error).__name__}: {error}"
            self.failures.append(f"{fault.name}: {text}")
