"""What a device that decodes many tokens at once is given, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow:
    """One request of a block."""

    token_id: int
    """The last known token, not computed yet."""
    position: int
    """Where it stands in the request."""
    pages: list[int]
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Block:
    """The tokens of a block and their logprobs, one list a row; a logprob that is not finite marks a broken row."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]


class BlockDecoder(Protocol):
    """Decodes blocks."""

    def decode(self, rows: Sequence[DecodeRow], *, num_steps: int) -> Block: ...
