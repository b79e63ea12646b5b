"""Seeds of rollouts: each is a hash of its identifiers, so it does not depend on other rollouts or on timing."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit hash of the parts, equal in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
