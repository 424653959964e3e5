"""Faults of threads: none can be had, as with a container's limit of processes."""

from __future__ import annotations

from tools.soak.faults.fault import Fault


class NoThreads(Fault):
    name, resource = "no-threads", "threads"
    what = (
        "lets every thread, or every other, that the server wants fail for a while (pthread_create: EAGAIN)"
    )

    def why_not(self) -> str | None:
        return None if self.site.system else "no C compiler for the library that stands before pthread_create"

    def apply(self) -> bool:
        assert self.site.system is not None
        n_before = self.site.system.get("n_no_threads")
        self.site.system.set(thread_every=self.rng.choice((1, 1, 2, 3)))
        try:
            self.site.wait(self.rng.uniform(0.3, 4))
        finally:
            self.site.system.set(thread_every=0)
        return self.site.system.get("n_no_threads") > n_before
