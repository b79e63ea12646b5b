"""Snapshots of recurrent states: from where a request with a known prefix can start. Holds no tensors.

Keys and values can be reused up to any block, but a recurrent state cannot be cut back: a prefix is reusable only up to
a token after which the state was kept. A snapshot is a slot of the states, under the hash of the prefix's last block;
the least recently used one gives way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


class SnapshotPool:
    """Snapshots in a range of slots."""

    def __init__(self, slots: range) -> None:
        self._slots = slots
        self._free = list(reversed(slots))
        self._slot_of: dict[bytes, int] = {}
        """Least recently used first."""

    def find(self, block_hashes: Sequence[bytes], late: Mapping[bytes, int]) -> tuple[int, int | None]:
        """The number of blocks of the longest prefix with a snapshot, also of those not published yet (`late`), and
        its slot; (0, None) where there is none."""
        for index in range(len(block_hashes) - 1, -1, -1):
            slot = self._slot_of.pop(block_hashes[index], None)
            if slot is not None:
                self._slot_of[block_hashes[index]] = slot
            if slot is not None or block_hashes[index] in late:
                return index + 1, late.get(block_hashes[index]) if slot is None else slot
        return 0, None

    def take(self, block_hash: bytes, kept: Collection[int]) -> int | None:
        """A slot for a snapshot that there is not yet: a free one, or the least recently used one outside of `kept`."""
        if block_hash in self._slot_of:
            return None
        if self._free:
            return self._free.pop()
        last = next((each for each, slot in self._slot_of.items() if slot not in kept), None)
        return None if last is None else self._slot_of.pop(last)

    def publish(self, block_hash: bytes, slot: int) -> None:
        """The state after the prefix is in the slot, or will be before any read; of two slots the first stays."""
        if self._slot_of.setdefault(block_hash, slot) != slot:
            self._free.append(slot)

    def reset(self) -> None:
        """Forget all snapshots."""
        self._free = list(reversed(self._slots))
        self._slot_of.clear()
