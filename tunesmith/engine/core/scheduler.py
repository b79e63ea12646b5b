"""Continuous batching: which tokens of which requests the next forward computes. Policy only, no tensors.

In each step every running request gets its next tokens (one when it decodes, a chunk while its prompt is prefilled).
Then waiting requests are admitted by ascending priority while tokens, slots and blocks last. When blocks run out, the
running request of lowest priority is preempted: it releases its blocks and later recomputes its prompt and sampled
tokens. Decisions depend on the requests and their order only, never on time.

Conversations with tools release their blocks between turns and find them again in the prefix cache, unless others
needed the blocks. When many conversations share a cache that cannot hold them all, each turn would evict the prefix of
another: requests that would evict a prefix before its next turn is due wait while enough others run.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from tunesmith.engine.core.block_manager import BlockPool, SnapshotPool, compute_salt, hash_block
from tunesmith.engine.core.request import Request

MIN_HEADROOM = 16
"""Blocks by which even a short request can grow before its keys and values continue elsewhere in the cache."""

MIN_RUNNING = 32
"""With fewer requests, running another costs no time: a decode step takes as long as reading the weights."""
KEPT_DISTANCES = 1.0
"""How long the prefixes of conversations are kept from new requests, in average distances between their turns."""
DISTANCE_WEIGHT = 0.05
"""Weight of a turn in the average distance."""

_get_priority = attrgetter("priority")


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens `[start, stop)` of a request that this step computes."""

    request: Request
    start: int
    stop: int
    source: int | None = None
    """Slot of the recurrent state before the first token: the request's own, or another; None: the model has none."""
    snapshots: tuple[tuple[int, int], ...] = ()
    """Positions before which the recurrent state is kept, and the slots for it."""
    draft: Sequence[int] = ()
    """Tokens that may follow the request's last one, computed with it; discarded from the first one on that is not
    sampled."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward computes."""
        return self.stop - self.start + len(self.draft)

    @property
    def has_own_state(self) -> bool:
        """The chunk continues from the state in the request's slot, or the model has no recurrent states."""
        return self.source in (None, self.request.slot)

    @property
    def has_last_token(self) -> bool:
        """The request's last token is in the chunk, so its next token is sampled."""
        return self.stop == len(self.request.token_ids)


@dataclass(slots=True)
class SchedulerOutput:
    """The chunks that one step computes, and the budget that is left while they are chosen."""

    chunks: list[ScheduledChunk] = field(default_factory=list)
    num_tokens_left: int = 0
    num_preemptions: int = 0
    may_preempt: bool = True
    get_forward: Callable[[ScheduledChunk], int] = lambda chunk: 0
    """Which of the step's forwards, in order 0 to 2, computes a chunk."""
    ready: tuple[dict[bytes, int], ...] = field(default_factory=lambda: ({}, {}, {}))
    """For each forward the full blocks that it may read before they are in the prefix cache, by hash."""
    kept_slots: set[int] = field(default_factory=set)
    """Slots of snapshots that the step reads or writes."""
    late_snapshots: dict[bytes, int] = field(default_factory=dict)
    """Snapshots that the first forward may not read, since a later one leaves them, and their slots."""


@dataclass(frozen=True, slots=True, eq=False)
class _DeferredBlocks:
    """Full blocks that a request released before they were hashed; hashed when a waiting request may match them."""

    token_ids: list[int]
    block_hashes: list[bytes]
    first: int
    """Index of the first of these blocks in the request."""
    blocks: list[int]


class Scheduler:
    """Waiting and running requests, and the blocks that they hold."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_num_seqs: int,
        max_batched_tokens: int,
        has_prefix_cache: bool,
        prefers_runs: bool = False,
        empty_slot: int | None = None,
        snapshots: SnapshotPool | None = None,
    ) -> None:
        """With `prefers_runs`, a request's blocks are adjacent in the cache where possible. `empty_slot`: of the
        recurrent state before any token, for models that have such states; they reuse prefixes that have
        `snapshots`."""
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_batched_tokens = max_batched_tokens
        self.has_prefix_cache = has_prefix_cache
        self.prefers_runs = prefers_runs
        self.empty_slot = empty_slot
        self.snapshots = snapshots
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.held: list[Request] = []
        """Requests that wait until `release_held`."""
        self.policy_version = 0
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._deferred: list[_DeferredBlocks] = []
        self._salt = compute_salt(0)
        self._num_ended = 0
        """Requests that ended: the clock by which released blocks age."""
        self._ended_at: dict[tuple[int, ...], int] = {}
        """When the last turn of each conversation ended, until its next turn comes."""
        self._turn_distance = 0.0
        """Requests that end, on average, between two turns of a conversation; 0 before a second turn has come."""

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=_get_priority)
        ended_at = self._ended_at.pop(request.conversation, None)
        if ended_at is not None:
            distance = self._num_ended - ended_at
            self._turn_distance += (distance - self._turn_distance) * (DISTANCE_WEIGHT if self._turn_distance else 1)

    def remove(self, request: Request) -> None:
        """Remove a request that ended, waiting or running."""
        if request.slot is None:
            (self.held if request in self.held else self.waiting).remove(request)
        else:
            self._num_ended += 1
            if request.conversation:
                self._ended_at[request.conversation] = self._num_ended
            self.running.remove(request)
            self._release(request)

    def schedule(
        self, *, may_preempt: bool = True, get_forward: Callable[[ScheduledChunk], int] = lambda chunk: 0
    ) -> SchedulerOutput:
        """Choose the next step's chunks.

        Requests in flight are left out. With `may_preempt=False`, requests wait while blocks are short. `get_forward`:
        which of the step's forwards computes a chunk.
        """
        step = SchedulerOutput(
            num_tokens_left=self.max_batched_tokens, may_preempt=may_preempt, get_forward=get_forward
        )
        # Running requests come first: if new ones took the last blocks, a running one would have to give up its own,
        # and compute its tokens again.
        self._continue_running(step)
        # a request that is admitted now would take the blocks that a preemption has just freed
        if self.waiting and not step.num_preemptions:
            self._admit_waiting(step)
        for block_hash, slot in step.late_snapshots.items():
            assert self.snapshots is not None
            self.snapshots.publish(block_hash, slot)
        return step

    def continue_running(self, is_included: Callable[[Request], bool]) -> list[ScheduledChunk]:
        """The next chunks of the included running requests, while blocks last; admits and preempts nothing."""
        step = SchedulerOutput(num_tokens_left=self.max_batched_tokens, may_preempt=False)
        self._continue_running(step, is_included)
        return step.chunks

    def reserve(self, requests: Sequence[Request], num_tokens_R: NDArray[np.int64]) -> bool:
        """Hold blocks for `num_tokens_R` tokens of each request; False, and none held, when too few are available."""
        num_held_R = np.array([len(request.blocks) for request in requests], dtype=np.int64)
        num_missing_R = -(-num_tokens_R // self.block_size) - num_held_R
        short = np.flatnonzero(num_missing_R > 0)
        lasts = num_missing_R[short].cumsum().tolist()
        blocks = self.pool.allocate(lasts[-1] if lasts else 0)
        if blocks is None:
            return False
        first = 0
        for row, last in zip(short.tolist(), lasts, strict=True):
            requests[row].blocks += blocks[first:last]
            first = last
        return True

    def make_room(self, request: Request, num_tokens: int) -> bool:
        """Hold blocks for `num_tokens` of a running request, if that preempts none."""
        return self._grow(request, num_tokens, SchedulerOutput(may_preempt=False))

    def commit(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Mark the chunks as computed: their keys and values are in the cache, or will be before any read."""
        for chunk in chunks:
            request = chunk.request
            request.num_computed = chunk.stop
            if self._shares_blocks(request) and chunk.stop // self.block_size > request.num_published:
                self._publish(request)

    def reset_cache(self, policy_version: int) -> None:
        """Preempt all running requests and clear the prefix cache; later hashes are salted with this policy version."""
        for request in list(self.running):
            self._preempt(request)
        self._begin_version(policy_version)
        self.pool.reset()

    def keep_cache(self, policy_version: int) -> None:
        """As `reset_cache`, but running requests keep their keys and values; no other request may read these."""
        self._begin_version(policy_version)
        self.pool.clear_prefixes()

    def hold(self) -> None:
        """Set all requests aside until `release_held`; they release their blocks."""
        for request in list(self.running):
            self._preempt(request)
        self.held += self.waiting
        self.waiting = []

    def release_held(self) -> None:
        """Let the requests wait for admission again."""
        held, self.held = self.held, []
        for request in held:
            self.add(request)

    def _begin_version(self, policy_version: int) -> None:
        # hashes start from a version's salt; those of the old version must match nothing under the new weights
        for request in (*self.running, *self.waiting, *self.held):
            request.block_hashes.clear()
        self._deferred.clear()
        self._ended_at.clear()
        if self.snapshots is not None:
            self.snapshots.reset()
        self._salt = compute_salt(policy_version)
        self.policy_version = policy_version

    def _shares_blocks(self, request: Request) -> bool:
        """Whether other requests may read the keys and values of this one: they are of the current weights."""
        return self.has_prefix_cache and request.cache_version == self.policy_version

    def _continue_running(self, step: SchedulerOutput, is_included: Callable[[Request], bool] = lambda _: True) -> None:
        """Schedule the next tokens of running requests, by priority."""
        for request in [request for request in self.running if not request.is_inflight and is_included(request)]:
            if not step.num_tokens_left or request.slot is None:
                break  # preempted by this loop, as is every request after it
            stop = min(len(request.token_ids), request.num_computed + step.num_tokens_left)
            if not self._grow(request, stop, step):
                break
            self._add_chunk(request, stop, step)

    def _add_chunk(self, request: Request, stop: int, step: SchedulerOutput) -> None:
        """Compute the request's next tokens up to `stop` in this step."""
        start, source = request.num_computed, request.slot if self.empty_slot is not None else None
        if request.state_source is not None:
            source, request.state_source = request.state_source, None
        chunk = ScheduledChunk(request, start, stop, source)
        late = step.late_snapshots if step.get_forward(chunk) else None
        for num_blocks in request.snapshot_blocks if self._shares_blocks(request) else ():
            position, block_hash = num_blocks * self.block_size, request.block_hashes[num_blocks - 1]
            assert self.snapshots is not None, "only snapshots give a request such blocks"
            is_new = start < position <= stop and (late is None or block_hash not in late)
            slot = self.snapshots.take(block_hash, step.kept_slots) if is_new else None
            if slot is not None:
                step.kept_slots.add(slot)
                chunk = replace(chunk, snapshots=(*chunk.snapshots, (position, slot)))
                if late is None:
                    self.snapshots.publish(block_hash, slot)
                else:
                    late[block_hash] = slot
        step.chunks.append(chunk)
        step.num_tokens_left -= stop - start

    def _grow(self, request: Request, num_tokens: int, step: SchedulerOutput) -> bool:
        """Hold blocks for `num_tokens`, preempting from the lowest priority up.

        False if the request itself was preempted, or if blocks are short and none may be preempted.
        """
        num_missing = -(-num_tokens // self.block_size) - len(request.blocks)
        if num_missing <= 0:
            return True
        while (blocks := self._allocate(request, request.blocks, num_missing)) is None:
            if not step.may_preempt:
                return False
            # `running` is sorted by priority: the last request gives way
            victim = self.running[-1]
            assert victim is not request or len(self.running) > 1, "the whole cache holds any one request"
            self._preempt(victim)
            step.num_preemptions += 1
            if victim is request:
                return False
        request.blocks += blocks
        return True

    def _admit_waiting(self, step: SchedulerOutput) -> None:
        """Start waiting requests by priority while tokens, slots and blocks last; when one lacks blocks, all wait."""
        self._publish_deferred()
        # Requests of a group arrive together and share their prompt. The first one computes it in this step, and the
        # others hold its blocks before these are in the prefix cache.
        for chunk in step.chunks:
            self._add_ready_blocks(chunk, step)
        admitted: set[int] = set()
        for request in self.waiting:
            if not step.num_tokens_left or not self._free_slots:
                break
            num_blocks = -(-len(request.token_ids) // self.block_size)
            self._hash_blocks(request.token_ids, request.block_hashes)
            # even if all blocks are cached, the last token is computed: the next one is sampled from its hidden state
            block_hashes = request.block_hashes[: (len(request.token_ids) - 1) // self.block_size]
            found = self.pool.find(block_hashes)
            forward = step.get_forward(ScheduledChunk(request, 0, len(request.token_ids)))
            ready = step.ready[forward]
            found += map(ready.__getitem__, takewhile(ready.__contains__, block_hashes[len(found) :]))
            request.state_source = self.empty_slot
            if self.snapshots is not None:
                # a prefix that two requests share, and the prompt, of which the last token is computed in any case
                shared = (len(found), (len(request.prompt_ids) - 1) // self.block_size)
                late = step.late_snapshots if forward else {}
                num_known, slot = self.snapshots.find(block_hashes[: len(found)], late)
                found = found[:num_known]
                request.snapshot_blocks = tuple(sorted({each for each in shared if each > num_known}))
                if slot is not None:
                    request.state_source = slot
                    step.kept_slots.add(slot)
            # Shorter requests behind this one may fit, but wait too: otherwise they would take each block that becomes
            # free, and a long request might never start.
            if not self._start(request, found, num_blocks - len(found)):
                break
            admitted.add(request.request_id)
            stop = min(len(request.token_ids), request.num_computed + step.num_tokens_left)
            self._add_chunk(request, stop, step)
            self._add_ready_blocks(step.chunks[-1], step)
        self.waiting = [request for request in self.waiting if request.request_id not in admitted]

    def _start(self, request: Request, found: list[int], num_missing: int) -> bool:
        """Hold all blocks of the request's tokens, if one block per running request remains to grow into."""
        # without a block for the next token of each running request, admission would soon cost a preemption
        num_left = self.pool.num_available - self.pool.count_cached(found) - num_missing
        if num_left < len(self.running) or self._evicts_next_turns(num_missing + len(self.running)):
            return False
        self.pool.hold(found)
        blocks = self._allocate(request, found, num_missing)
        assert blocks is not None
        request.blocks = found + blocks
        request.num_computed = len(found) * self.block_size
        request.num_published = len(found)
        request.cache_version = self.policy_version
        request.slot = self._free_slots.pop()
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed
        insort(self.running, request, key=_get_priority)
        return True

    def _evicts_next_turns(self, num_blocks: int) -> bool:
        """Whether allocating these blocks evicts the prefix of a conversation whose next turn will soon be here.

        Running more requests at once would then only mean to compute more of them again.
        """
        if len(self.running) < MIN_RUNNING or not self._turn_distance:
            return False
        released_at = self.pool.find_release_time(num_blocks)
        return released_at is not None and self._num_ended - released_at < KEPT_DISTANCES * self._turn_distance

    def _allocate(self, request: Request, before: Sequence[int], num_blocks: int) -> list[int] | None:
        """Blocks after those `before`; a new run has headroom to double, up to the request's maximum length."""
        if not self.prefers_runs:
            return self.pool.allocate(num_blocks)
        num_held = len(before) + num_blocks
        max_num_blocks = -(-request.max_num_tokens // self.block_size)
        headroom = max(0, min(max(num_held, MIN_HEADROOM), max_num_blocks - num_held))
        return self.pool.allocate_run(num_blocks, after=before[-1] if before else None, headroom=headroom)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        # it keeps its priority, so it starts again before all requests of lower priority
        self.add(request)

    def _release(self, request: Request) -> None:
        assert request.slot is not None
        blocks = request.blocks[request.num_published : request.num_computed // self.block_size]
        if blocks and self._shares_blocks(request):
            self._deferred.append(
                _DeferredBlocks(request.token_ids, request.block_hashes, request.num_published, blocks)
            )
            # most released blocks are never looked up, so they are hashed only once a waiting request might match them
            self.pool.defer_publish(blocks, self._deferred[-1])
        self.pool.release(request.blocks, time=self._num_ended)
        self._free_slots.append(request.slot)
        request.blocks = []
        request.runs = []
        request.slot = None
        request.num_computed = request.num_published = 0

    def _add_ready_blocks(self, chunk: ScheduledChunk, step: SchedulerOutput) -> None:
        """Full blocks that the chunk fills: its forward may read them, since each layer writes all keys before it
        attends, and so may later ones."""
        request, forward = chunk.request, step.get_forward(chunk)
        if forward and chunk.num_tokens == 1:
            return  # kernels that decode attend while they write
        blocks = slice(request.num_published, chunk.stop // self.block_size)
        filled = dict(zip(request.block_hashes[blocks], request.blocks[blocks], strict=False))
        for ready in step.ready[forward:]:
            ready.update(filled)

    def _hash_blocks(self, token_ids: list[int], block_hashes: list[bytes]) -> None:
        """Append the hashes of full blocks that have none yet; none are needed without a prefix cache."""
        size = self.block_size
        first, last = len(block_hashes) * size, len(token_ids) // size * size
        if first == last or not self.has_prefix_cache:
            return
        parent = block_hashes[-1] if block_hashes else self._salt
        new_ids = array("i", token_ids[first:last])
        for start in range(0, last - first, size):
            parent = hash_block(parent, new_ids[start : start + size])
            block_hashes.append(parent)

    def _publish(self, request: Request) -> None:
        self._hash_blocks(request.token_ids, request.block_hashes)
        num_full = request.num_computed // self.block_size
        for index in range(request.num_published, num_full):
            self.pool.publish(request.blocks[index], request.block_hashes[index])
        request.num_published = num_full

    def _publish_deferred(self) -> None:
        for deferred in self._deferred:
            self._hash_blocks(deferred.token_ids, deferred.block_hashes)
            for block, block_hash in zip(deferred.blocks, deferred.block_hashes[deferred.first :], strict=False):
                self.pool.publish_deferred(block, block_hash, deferred)
        self._deferred.clear()
