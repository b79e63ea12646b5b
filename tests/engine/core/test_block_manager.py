"""Blocks are never lost or shared by mistake, and are found only by the tokens that filled them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tunesmith.engine.core.block_manager import BlockPool, compute_salt, hash_block


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(2) is None
    assert pool.num_available == 1


def test_a_run_follows_the_block_before_it_or_keeps_headroom_on_both_sides() -> None:
    pool = BlockPool(32)
    first = pool.allocate_run(2, after=None, headroom=4) or []
    assert first == [0, 1]
    second = pool.allocate_run(3, after=None, headroom=4) or []
    assert second == [6, 7, 8]
    assert pool.allocate_run(2, after=1, headroom=4) == [2, 3]
    assert pool.allocate_run(3, after=3, headroom=0) == [9, 10, 11]


def test_without_adjacent_free_blocks_any_free_blocks_are_allocated() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(5) or []
    pool.publish(blocks[4], b"hash")
    pool.release([blocks[1]])
    pool.release([blocks[4]])
    assert sorted(pool.allocate_run(2, after=0, headroom=3) or []) == [1, 4]
    assert pool.allocate_run(1, after=None, headroom=0) is None


def test_a_released_block_is_found_by_its_hash_until_it_is_evicted() -> None:
    pool = BlockPool(2)
    block_hash = hash_block(compute_salt(0), [1, 2])
    (block,) = pool.allocate(1) or []
    pool.publish(block, block_hash)
    pool.release([block])
    assert pool.find([block_hash]) == [block]
    assert pool.num_available == 2
    assert pool.allocate(2) is not None
    assert pool.find([block_hash]) == []


def test_the_least_recently_released_block_is_evicted_first_and_a_prefix_after_its_continuation() -> None:
    pool = BlockPool(4)
    block_hashes = [bytes([number]) for number in range(4)]
    blocks = pool.allocate(4) or []
    for block, block_hash in zip(blocks, block_hashes, strict=True):
        pool.publish(block, block_hash)
    pool.release(blocks[2:])
    pool.release(blocks[:2])
    pool.hold(pool.find(block_hashes[2:3]))
    assert pool.allocate(1) == [blocks[3]]
    assert pool.allocate(1) == [blocks[1]]
    assert pool.find(block_hashes) == [blocks[0]]


def test_a_block_held_twice_is_free_after_two_releases() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1) or []
    pool.publish(block, b"hash")
    pool.hold([block])
    pool.release([block])
    assert pool.num_available == 0
    pool.release([block])
    assert pool.num_available == 1


def test_hashes_differ_by_tokens_parents_and_versions() -> None:
    salts = [compute_salt(0), compute_salt(1)]
    block_hashes = {hash_block(salt, ids) for salt in salts for ids in ([1, 2], [2, 1], [1, 2, 0])}
    block_hashes |= {hash_block(block_hash, [1, 2]) for block_hash in list(block_hashes)}
    assert len(block_hashes) == 12


def test_an_unpublished_block_stays_held_and_is_free_once_released() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1) or []
    pool.publish(block, b"hash")
    pool.unpublish([block])
    assert pool.find([b"hash"]) == []
    pool.release([block])
    assert pool.allocate(1) == [block]


@given(st.data())
def test_any_sequence_of_calls_keeps_reference_counts_consistent(data: st.DataObject) -> None:
    pool = BlockPool(data.draw(st.integers(1, 8)))
    holdings: list[list[int]] = []
    digest_of: dict[int, bytes] = {}
    for step in range(data.draw(st.integers(1, 40))):
        match action := data.draw(st.sampled_from(["allocate", "allocate_run", "release", "publish", "find"])):
            case "allocate" | "allocate_run":
                count = data.draw(st.integers(0, 4))
                num_available = pool.num_available
                if action == "allocate":
                    blocks = pool.allocate(count)
                else:
                    after = data.draw(st.none() | st.integers(0, pool.num_blocks - 1))
                    blocks = pool.allocate_run(count, after=after, headroom=data.draw(st.integers(0, 4)))
                assert (blocks is None) == (count > num_available)
                if blocks is not None:
                    assert not set(blocks) & {block for holding in holdings for block in holding}
                    holdings.append(blocks)
                    for block in blocks:
                        digest_of.pop(block, None)
            case "release" if holdings:
                pool.release(holdings.pop(data.draw(st.integers(0, len(holdings) - 1))))
            case "publish" if any(holdings):
                block = data.draw(st.sampled_from([block for holding in holdings for block in holding]))
                if block not in digest_of:
                    digest_of[block] = step.to_bytes(2, "big")
                    pool.publish(block, digest_of[block])
            case "find" if digest_of:
                block = data.draw(st.sampled_from(sorted(digest_of)))
                assert pool.find([digest_of[block]]) == [block]
                pool.hold([block])
                holdings.append([block])
            case _:
                pass
        held = {block for holding in holdings for block in holding}
        assert pool.num_available == pool.num_blocks - len(held)


def test_a_deferred_block_stays_cached_and_is_found_once_published() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2) or []
    pool.defer_publish(blocks, "owner")
    pool.release(blocks)
    assert pool.num_available == 3
    assert pool.allocate(1) == [2]
    pool.publish_deferred(blocks[0], b"hash", "owner")
    assert pool.find([b"hash"]) == [blocks[0]]
    assert pool.allocate(2) == [blocks[1], blocks[0]]


def test_a_deferred_block_that_was_evicted_is_not_published() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1) or []
    pool.defer_publish(blocks, "first")
    pool.release(blocks)
    assert pool.allocate(1) == blocks
    pool.defer_publish(blocks, "second")
    pool.publish_deferred(blocks[0], b"old", "first")
    assert pool.find([b"old"]) == []
    pool.publish_deferred(blocks[0], b"new", "second")
    assert pool.find([b"new"]) == blocks


def test_a_deferred_block_with_a_known_hash_is_freed() -> None:
    pool = BlockPool(3)
    first, second, _ = pool.allocate(3) or []
    pool.publish(first, b"hash")
    pool.defer_publish([second], "owner")
    pool.release([first, second])
    pool.publish_deferred(second, b"hash", "owner")
    assert pool.find([b"hash"]) == [first]
    assert pool.allocate(1) == [second]


def test_the_release_time_is_that_of_the_youngest_block_to_be_evicted() -> None:
    pool = BlockPool(5)
    for time in (3, 7):
        blocks = pool.allocate(2)
        assert blocks is not None
        for block in blocks:
            pool.publish(block, bytes([time, block]))
        pool.release(blocks, time=time)
    assert [pool.find_release_time(num_blocks) for num_blocks in range(7)] == [None, None, 3, 3, 7, 7, None]
