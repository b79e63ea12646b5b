"""What AgentScope's agents print: every message, unless its own environment variable says otherwise.

Agents read the variable when they are built. It is set while a run lasts and restored afterwards, so an agent that the
same process builds outside of a run prints as before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SWITCH = "AGENTSCOPE_DISABLE_CONSOLE_OUTPUT"


@contextmanager
def agent_output(*, is_shown: bool) -> Iterator[Callable[[bool], None]]:
    """Within, agents that are built print their messages or not; the function that is given changes that.

    Where nothing is to be shown, a value that the caller's environment has for the variable stays.
    """
    before = os.environ.get(SWITCH)

    def switch(is_shown: bool) -> None:
        if is_shown:
            os.environ[SWITCH] = "false"
        else:
            os.environ[SWITCH] = "true" if before is None else before

    switch(is_shown)
    try:
        yield switch
    finally:
        if before is None:
            os.environ.pop(SWITCH, None)
        else:
            os.environ[SWITCH] = before
