"""Pages are never lost, never shared by mistake, and found again only by the tokens that filled them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tunesmith.engine.core.block_manager import PagePool, compute_digest, compute_salt


def test_allocation_is_all_or_nothing() -> None:
    pool = PagePool(3)
    assert pool.allocate(4) is None
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(2) is None
    assert pool.num_available == 1


def test_a_run_follows_the_page_before_it_or_leaves_room_on_both_sides() -> None:
    pool = PagePool(32)
    first = pool.allocate_run(2, after=None, room=4) or []
    assert first == [0, 1]
    second = pool.allocate_run(3, after=None, room=4) or []
    assert second == [6, 7, 8]
    assert pool.allocate_run(2, after=1, room=4) == [2, 3]
    assert pool.allocate_run(3, after=3, room=0) == [9, 10, 11]


def test_a_run_that_fits_nowhere_is_made_of_what_is_free() -> None:
    pool = PagePool(5)
    pages = pool.allocate(5) or []
    pool.publish(pages[4], b"digest")
    pool.release([pages[1]])
    pool.release([pages[4]])
    assert sorted(pool.allocate_run(2, after=0, room=3) or []) == [1, 4]
    assert pool.allocate_run(1, after=None, room=0) is None


def test_a_released_page_is_found_by_its_digest_until_it_is_needed() -> None:
    pool = PagePool(2)
    digest = compute_digest(compute_salt(0), [1, 2])
    (page,) = pool.allocate(1) or []
    pool.publish(page, digest)
    pool.release([page])
    assert pool.find([digest]) == [page]
    assert pool.num_available == 2
    assert pool.allocate(2) is not None
    assert pool.find([digest]) == []


def test_the_page_left_longest_ago_is_dropped_first_and_a_prefix_after_its_continuation() -> None:
    pool = PagePool(4)
    digests = [bytes([number]) for number in range(4)]
    pages = pool.allocate(4) or []
    for page, digest in zip(pages, digests, strict=True):
        pool.publish(page, digest)
    pool.release(pages[2:])
    pool.release(pages[:2])
    pool.hold(pool.find(digests[2:3]))
    assert pool.allocate(1) == [pages[3]]
    assert pool.allocate(1) == [pages[1]]
    assert pool.find(digests) == [pages[0]]


def test_a_page_held_twice_is_free_after_two_releases() -> None:
    pool = PagePool(1)
    (page,) = pool.allocate(1) or []
    pool.publish(page, b"digest")
    pool.hold([page])
    pool.release([page])
    assert pool.num_available == 0
    pool.release([page])
    assert pool.num_available == 1


def test_digests_tell_tokens_parents_and_versions_apart() -> None:
    salts = [compute_salt(0), compute_salt(1)]
    digests = {compute_digest(salt, ids) for salt in salts for ids in ([1, 2], [2, 1], [1, 2, 0])}
    digests |= {compute_digest(digest, [1, 2]) for digest in list(digests)}
    assert len(digests) == 12


def test_a_forgotten_page_stays_with_its_holder_and_is_free_afterwards() -> None:
    pool = PagePool(1)
    (page,) = pool.allocate(1) or []
    pool.publish(page, b"digest")
    pool.forget([page])
    assert pool.find([b"digest"]) == []
    pool.release([page])
    assert pool.allocate(1) == [page]


@given(st.data())
def test_any_sequence_of_calls_keeps_the_books(data: st.DataObject) -> None:
    pool = PagePool(data.draw(st.integers(1, 8)))
    holdings: list[list[int]] = []
    digest_of: dict[int, bytes] = {}
    for step in range(data.draw(st.integers(1, 40))):
        match action := data.draw(st.sampled_from(["allocate", "allocate_run", "release", "publish", "find"])):
            case "allocate" | "allocate_run":
                count = data.draw(st.integers(0, 4))
                num_available = pool.num_available
                if action == "allocate":
                    pages = pool.allocate(count)
                else:
                    after = data.draw(st.none() | st.integers(0, pool.num_pages - 1))
                    pages = pool.allocate_run(count, after=after, room=data.draw(st.integers(0, 4)))
                assert (pages is None) == (count > num_available)
                if pages is not None:
                    assert not set(pages) & {page for holding in holdings for page in holding}
                    holdings.append(pages)
                    for page in pages:
                        digest_of.pop(page, None)
            case "release" if holdings:
                pool.release(holdings.pop(data.draw(st.integers(0, len(holdings) - 1))))
            case "publish" if any(holdings):
                page = data.draw(st.sampled_from([page for holding in holdings for page in holding]))
                if page not in digest_of:
                    digest_of[page] = step.to_bytes(2, "big")
                    pool.publish(page, digest_of[page])
            case "find" if digest_of:
                page = data.draw(st.sampled_from(sorted(digest_of)))
                assert pool.find([digest_of[page]]) == [page]
                pool.hold([page])
                holdings.append([page])
            case _:
                pass
        held = {page for holding in holdings for page in holding}
        assert pool.num_available == pool.num_pages - len(held)


def test_a_promised_page_is_kept_and_found_once_its_digest_comes() -> None:
    pool = PagePool(3)
    pages = pool.allocate(2) or []
    pool.promise(pages, "promise")
    pool.release(pages)
    assert pool.num_available == 3
    assert pool.allocate(1) == [2]
    pool.keep_promise(pages[0], b"digest", "promise")
    assert pool.find([b"digest"]) == [pages[0]]
    assert pool.allocate(2) == [pages[1], pages[0]]


def test_a_promised_page_that_was_dropped_is_not_found_in_its_next_holders_hands() -> None:
    pool = PagePool(1)
    pages = pool.allocate(1) or []
    pool.promise(pages, "first")
    pool.release(pages)
    assert pool.allocate(1) == pages
    pool.promise(pages, "second")
    pool.keep_promise(pages[0], b"old", "first")
    assert pool.find([b"old"]) == []
    pool.keep_promise(pages[0], b"new", "second")
    assert pool.find([b"new"]) == pages


def test_a_promised_page_whose_digest_is_known_already_is_free() -> None:
    pool = PagePool(3)
    first, second, _ = pool.allocate(3) or []
    pool.publish(first, b"digest")
    pool.promise([second], "promise")
    pool.release([first, second])
    pool.keep_promise(second, b"digest", "promise")
    assert pool.find([b"digest"]) == [first]
    assert pool.allocate(1) == [second]
