"""Silence the console output of AgentScope's agents, which print every message by default.

Agents read an environment variable when they are constructed. It is set during a run and restored afterwards, so agents
constructed outside of a run print as before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OUTPUT_VARIABLE = "AGENTSCOPE_DISABLE_CONSOLE_OUTPUT"


@contextmanager
def agent_output(*, is_shown: bool) -> Iterator[Callable[[bool], None]]:
    """Set whether agents constructed in this context print their messages; yields a function that changes it.

    With `is_shown=False`, a value that the environment already has for the variable is kept.
    """
    before = os.environ.get(OUTPUT_VARIABLE)

    def switch(is_shown: bool) -> None:
        if is_shown:
            os.environ[OUTPUT_VARIABLE] = "false"
        else:
            os.environ[OUTPUT_VARIABLE] = "true" if before is None else before

    switch(is_shown)
    try:
        yield switch
    finally:
        if before is None:
            os.environ.pop(OUTPUT_VARIABLE, None)
        else:
            os.environ[OUTPUT_VARIABLE] = before
