"""Entry point of the command `tunesmith` and of `python -m tunesmith`."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line. Until it is imported Ctrl-C ends the process as in any program, without a traceback."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tunesmith import cli

    signal.signal(signal.SIGINT, handler)
    cli.main()


if __name__ == "__main__":
    main()
