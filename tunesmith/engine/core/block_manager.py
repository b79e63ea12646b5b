"""Reference counts of KV-cache blocks, and the prefix cache: which full blocks other requests may reuse.

A block is free, held by one or more requests, or cached: held by none but still found by the hash of its tokens and
all tokens before it. `allocate` takes free blocks first, then evicts cached blocks, least recently released first.
A block may be released before its hash is computed: `defer_publish` keeps it cached until `publish_deferred` adds the
hash. Hashes start from a salt (the policy version), so blocks of other weights never match. Holds no tensors.

Keys and values can be reused up to any block, but a recurrent state cannot be cut back: a prefix is reusable only up to
a token after which the state was kept. Such a snapshot is a slot of the states, under the hash of the prefix's last
block; the least recently used one gives way.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash one full block: its tokens and the hash of the block before it (or the salt)."""
    return hashlib.blake2b(parent + array("i", token_ids).tobytes(), digest_size=16).digest()


def compute_salt(policy_version: int) -> bytes:
    """The parent hash of the first block of a request at this policy version."""
    return hashlib.blake2b(str(policy_version).encode(), digest_size=16).digest()


class BlockPool:
    """Reference counts of blocks, and the prefix cache over them."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._deferred_by: dict[int, object] = {}
        self._all_free = dict.fromkeys(range(num_blocks - 1, -1, -1))
        # dicts as ordered sets: any block can be removed in constant time, and the last one taken
        self._free = self._all_free.copy()  # `popitem` takes the last one
        self._is_free = bytearray(b"\1") * num_blocks
        self._cached: dict[int, int] = {}  # in order of release, with the time of it; a dict removes in O(1)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could return now."""
        return len(self._free) + len(self._cached)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Hold `num_blocks` blocks; None, and none held, when too few are available."""
        if num_blocks > self.num_available:
            return None
        # free blocks first: a cached one may still save a later request its prefill
        blocks = [self._free.popitem()[0] for _ in range(min(len(self._free), num_blocks))]
        blocks += [self._evict() for _ in range(num_blocks - len(blocks))]
        for block in blocks:
            self._ref_counts[block] = 1
            self._is_free[block] = 0
        return blocks

    def allocate_run(self, num_blocks: int, *, after: int | None, headroom: int) -> list[int] | None:
        """Like `allocate`, but adjacent blocks where possible: attention reads these as one view instead of a copy.

        They follow block `after` if those blocks are free. Otherwise, if possible, `headroom` free blocks remain on
        either side: behind them for this request to grow into, before them for the request whose blocks end there.
        """
        if num_blocks > self.num_available:
            return None
        while len(self._free) < num_blocks:
            self._free_block(self._evict())
        first = self._find_free_run(num_blocks, after, headroom)
        if first is None:
            return self.allocate(num_blocks)
        blocks = list(range(first, first + num_blocks))
        for block in blocks:
            del self._free[block]
            self._ref_counts[block] = 1
        self._is_free[first : first + num_blocks] = bytes(num_blocks)
        return blocks

    def find(self, block_hashes: Iterable[bytes]) -> list[int]:
        """Cached or held blocks of the longest known prefix; the caller does not hold them yet."""
        blocks = []
        for block_hash in block_hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_cached(self, blocks: Iterable[int]) -> int:
        """How many of these blocks no request holds: holding them leaves that many fewer to allocate."""
        return sum(block in self._cached for block in blocks)

    def find_release_time(self, num_blocks: int) -> int | None:
        """When the youngest of the blocks was released that `allocate` would evict for `num_blocks`; None: it would
        evict none."""
        num_evicted = num_blocks - len(self._free)
        return None if num_evicted <= 0 else next(islice(self._cached.values(), num_evicted - 1, None), None)

    def select_unshared(self, blocks: Iterable[int]) -> list[int]:
        """The blocks that exactly one request holds, of blocks that are held."""
        return [block for block in blocks if self._ref_counts[block] == 1]

    def hold(self, blocks: Iterable[int]) -> None:
        """Increment the reference counts of blocks that `find` returned."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._cached[block]
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int], *, time: int = 0) -> None:
        """Decrement reference counts, in reverse, so that the last block of a prefix is evicted before the first."""
        for block in reversed(blocks):
            ref_count = self._ref_counts[block] = self._ref_counts[block] - 1
            assert ref_count >= 0, f"block {block} was released more often than held"
            if ref_count == 0:
                if self._hash_of[block] is None and block not in self._deferred_by:
                    self._free_block(block)
                else:
                    self._cached[block] = time

    def publish(self, block: int, block_hash: bytes) -> None:
        """Add this full block to the prefix cache, unless another block has the same hash already."""
        if block_hash not in self._block_of and self._hash_of[block] is None:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def defer_publish(self, blocks: Iterable[int], owner: object) -> None:
        """Keep full blocks cached once released; `publish_deferred` by the same owner adds their hashes later."""
        for block in blocks:
            if self._hash_of[block] is None:
                self._deferred_by[block] = owner

    def publish_deferred(self, block: int, block_hash: bytes, owner: object) -> None:
        """Publish a deferred block, unless it was evicted since; free it if another block has the same hash."""
        # another request may have evicted and refilled the block, and its content is then no longer that of this hash
        if self._deferred_by.get(block) is not owner:
            return
        del self._deferred_by[block]
        self.publish(block, block_hash)
        if self._hash_of[block] is None and block in self._cached:
            del self._cached[block]
            self._free_block(block)

    def unpublish(self, blocks: Iterable[int]) -> None:
        """Remove blocks from the prefix cache; their holders keep them."""
        for block in blocks:
            self._deferred_by.pop(block, None)
            block_hash = self._hash_of[block]
            if block_hash is not None:
                del self._block_of[block_hash]
                self._hash_of[block] = None

    def reset(self) -> None:
        """Free all blocks and clear the prefix cache; no block may be held."""
        assert not any(self._ref_counts), "blocks are held"
        self._hash_of = [None] * self.num_blocks
        self._block_of.clear()
        self._deferred_by.clear()
        self._cached.clear()
        self._free = self._all_free.copy()  # several times faster than building it, at hundreds of thousands of blocks
        self._is_free = bytearray(b"\1") * self.num_blocks

    def clear_prefixes(self) -> None:
        """Clear the prefix cache; blocks that requests hold stay theirs, but no other request finds them."""
        self._hash_of = [None] * self.num_blocks
        self._block_of.clear()
        self._deferred_by.clear()
        for block in self._cached:
            self._free_block(block)
        self._cached.clear()

    def _find_free_run(self, num_blocks: int, after: int | None, headroom: int) -> int | None:
        """The first of `num_blocks` adjacent free blocks; None where there are none."""
        if after is not None and self._is_free.startswith(b"\1" * num_blocks, after + 1):
            return after + 1
        while True:
            first = self._is_free.find(b"\1" * (num_blocks + 2 * headroom))
            if first >= 0:
                return first + headroom if first else first
            if not headroom:
                return None
            headroom //= 2

    def _free_block(self, block: int) -> None:
        self._free[block] = None
        self._is_free[block] = 1

    def _evict(self) -> int:
        block = next(iter(self._cached))
        del self._cached[block]
        self.unpublish([block])
        return block


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
