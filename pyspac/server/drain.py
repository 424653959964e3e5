"""Letting llama-server finish what it has begun: a running server in, one without waiting clients out.

A load balancer asks each server for its /health. At first only that says no, so that requests go elsewhere;
later new ones are refused as well (patches/upstream/0007). What was begun is answered.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Final

from pyspac.server import log
from pyspac.server.child import Child
from pyspac.server.health import get_json
from pyspac.server.options import ServeOptions

LOOK_S: Final = 0.1
ANNOUNCE_S: Final = 5.0  # for routers to look at /health, before anything is refused
OURS: Final = 1  # the connection that asks


def drain(
    server: Child, options: ServeOptions, port: int, *, limit_s: float, is_stopped: Callable[[], bool]
) -> None:
    """Wait until no connection is open, for `limit_s` at most, or until `is_stopped`.

    New requests are refused after `ANNOUNCE_S`. A connection that is kept open without a request counts, for
    the five seconds until the server closes it.
    """
    server.send(signal.SIGUSR1)
    log.event("SIGTERM: /health says no from now on; answers under way are finished", event="draining")
    start_s = time.monotonic()
    has_refused = False
    while n_open := _n_open(options, port):
        age_s = time.monotonic() - start_s
        if server.exit_code() is not None:
            return
        if is_stopped() or age_s >= limit_s:
            log.warning(
                f"connections that are cut off: {n_open}, "
                f"as --drain {limit_s:g} is over, or a second signal came"
            )
            return
        if age_s >= ANNOUNCE_S and not has_refused:
            server.send(signal.SIGUSR1)
            has_refused = True
        time.sleep(LOOK_S)


def _n_open(options: ServeOptions, port: int) -> int:
    """Connections that others have; 1 if the server does not say, as before it has seen the signal."""
    _status, body = get_json(options.host, port, f"{options.api_prefix}/health", is_tls=options.is_tls)
    try:
        return max(0, int(body["error"]["n_connections"]) - OURS)
    except (KeyError, TypeError, ValueError):
        return 1
