from __future__ import annotations

from enum import Enum


class RequestOutputKind(Enum):
    DELTA = 1
