"""Seeds of rollouts: each is a hash of what it belongs to, so none depends on what else runs or when."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that is the same in every process for the same parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def derive_round_seed(seed: int, round_index: int) -> int:
    """The seed of a step's first round of tasks, which is the run's own, or of a later round."""
    return derive_seed(seed, "refill", round_index) if round_index else seed
