"""Faults of threads: none can be had, as with a container's limit of processes."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Final

from tools.served import HOST
from tools.soak.faults.fault import Fault

N_CONNECTIONS: Final = 400  # at most; the server keeps threads of earlier ones for a while


class NoThreads(Fault):
    name, resource = "no-threads", "connections"  # others' idle ones would wait for the same threads
    what = (
        "lets every thread, or every other, that the server wants fail for a while (pthread_create: "
        "EAGAIN), and opens connections until it wants some"
    )

    def why_not(self) -> str | None:
        return None if self.site.system else "no C compiler for the library that stands before pthread_create"

    def apply(self) -> bool:
        assert self.site.system is not None
        n_before = self.site.system.get("n_no_threads")
        self.site.system.set(thread_every=self.rng.choice((1, 1, 2, 3)))
        try:
            with contextlib.ExitStack() as stack:
                self._make_it_want_some(stack, n_before)
                self.site.wait(self.rng.uniform(0.3, 4))
        finally:
            self.site.system.set(thread_every=0)
        return self.site.system.get("n_no_threads") > n_before

    def _make_it_want_some(self, stack: contextlib.ExitStack, n_before: int) -> None:
        """By idle connections that stay open for `stack`: each takes one of its threads."""
        assert self.site.system is not None
        with contextlib.suppress(OSError):  # it takes no more of them
            for _ in range(N_CONNECTIONS):
                if self.site.system.get("n_no_threads") > n_before:
                    return
                connection = socket.create_connection((HOST, self.site.serve.port), timeout=1)
                stack.enter_context(contextlib.closing(connection))
                time.sleep(0.002)
