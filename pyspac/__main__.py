"""`pyspac` and `python -m pyspac`: the command line, and Ctrl-C while it is still being loaded."""

from __future__ import annotations

import os
import signal
import sys

from pyspac.server.secrets import leave_command_line


def main() -> None:
    """Entry point of the `pyspac` script."""
    leave_command_line()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else it is ignored, as in the background of a script
        # there is nothing to tidy up yet, and an exception would come out of another module's import
        signal.signal(signal.SIGINT, lambda _signum, _frame: os._exit(130))
    from pyspac import cli

    app = cli.app_of(sys.argv[1:])
    signal.signal(signal.SIGINT, before)
    try:
        cli.main(app)
    except KeyboardInterrupt:  # before a command was found that tidies up
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
