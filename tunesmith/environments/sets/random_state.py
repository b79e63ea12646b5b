"""State of the process-wide random generators that belongs to one environment.

Some packages draw from `random` and `numpy.random` themselves. Around each of their calls the environment's own state
is installed and the former one restored, so that episodes do not depend on others of the process, nor a run on them.
So these calls run on the event loop, never in threads, and `environment.step_timeout_s` cannot interrupt one.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Iterator

import numpy as np


class OwnRandomState:
    """The generators of one environment; `installed` may not be left by an await."""

    def __init__(self, seed: int) -> None:
        with _restored():
            random.seed(seed)
            np.random.seed(seed % 2**32)
            self._state = random.getstate(), np.random.get_state()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """A block that draws from this state and prints nothing."""
        with _restored(), contextlib.redirect_stdout(io.StringIO()):
            random.setstate(self._state[0])
            np.random.set_state(self._state[1])
            try:
                yield
            finally:
                self._state = random.getstate(), np.random.get_state()


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    saved = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(saved[0])
        np.random.set_state(saved[1])
