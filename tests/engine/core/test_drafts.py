"""Which drafts the engine verifies: from where, how long, and when they no longer pay."""

from __future__ import annotations

import random

import pytest

from tunesmith.engine.core.drafts import MAX_DRAFT, MAX_WAIT, Drafter, ForwardCost
from tunesmith.engine.core.request import Request
from tunesmith.types import Distribution, Sampling

FREE = ForwardCost(step=1.0, row=0.0, context=0.0)


def build_request(
    request_id: int, prompt: list[int], order: tuple[int, ...] = (), max_tokens: int = 100, **distribution: float
) -> Request:
    sampling = Sampling(max_tokens=max_tokens, distribution=Distribution(**distribution))
    return Request(request_id=request_id, prompt_ids=tuple(prompt), sampling=sampling, order=order)


def build_drafter(cost: ForwardCost = FREE, max_requests: int = 8) -> Drafter:
    return Drafter(max_requests=max_requests, cost=cost)


def propose(drafter: Drafter, *requests: Request, max_tokens: int = 1000) -> dict[int, list[int]]:
    return drafter.propose(requests, max_tokens=max_tokens)


def test_a_draft_is_what_followed_the_same_tokens_before_and_no_longer_than_they_are() -> None:
    drafter, request = build_drafter(), build_request(0, [9, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2])
    assert propose(drafter, request) == {}
    request.extend([3], [-1.0], 0)
    assert propose(drafter, request) == {0: [4, 5, 6]}  # three tokens match
    request.extend([4], [-1.0], 0)
    assert propose(drafter, request) == {0: [5, 6, 7, 8]}


def test_the_longer_match_is_taken_from_the_request_or_from_its_group() -> None:
    drafter = build_drafter()
    finished = build_request(0, [50, 51, 52], (4, 0))
    finished.extend([1, 2, 3, 4, 70, 71], [-1.0] * 6, 0)
    drafter.end(finished)
    mate = build_request(1, [2, 3, 4, 60, 61, 1, 2, 3, 4], (4, 1))
    stranger = build_request(2, [2, 3, 4, 60, 61, 1, 2, 3, 4], (5, 1))
    assert propose(drafter, mate, stranger) == {1: [70, 71], 2: [60, 61, 1]}
    opening = build_request(3, [50, 51, 52], (4, 2))
    assert propose(drafter, opening) == {3: [1, 2, 3]}  # the end of the prompt finds how the group's replies begin


def test_drafts_end_before_the_length_limit_and_the_budget_of_the_step() -> None:
    prompt = [*range(20), *range(10)]
    assert propose(build_drafter(), build_request(0, prompt)) == {0: list(range(10, 20))}
    assert propose(build_drafter(), build_request(0, prompt, max_tokens=4)) == {0: [10, 11, 12]}
    assert propose(build_drafter(), build_request(0, prompt, max_tokens=1)) == {}
    drafts = propose(build_drafter(), build_request(0, prompt), build_request(1, prompt), max_tokens=13)
    assert drafts == {0: list(range(10, 20)), 1: [10, 11, 12]}
    long = [*range(100), *range(60)]
    assert propose(build_drafter(), build_request(0, long)) == {0: list(range(60, 60 + MAX_DRAFT))}


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_exclude_a_request(name: str) -> None:
    plain, penalized = (
        build_request(0, [*range(20), *range(10)]), build_request(1, [*range(20), *range(10)], **{name: 1.5})
    )  # fmt: skip
    assert set(propose(build_drafter(), plain, penalized)) == {0}


def test_nothing_is_drafted_while_many_requests_run() -> None:
    requests = [build_request(index, [*range(20), *range(10)]) for index in range(3)]
    drafter = build_drafter(max_requests=2)
    assert not drafter.is_due(requests) and propose(drafter, *requests) == {}
    assert drafter.is_due(requests[:2]) and set(propose(drafter, *requests[:2])) == {0, 1}


def test_the_expected_gain_decides_about_a_draft_and_its_length() -> None:
    """At the rate of 0.6 of a new request, j tokens are right with 0.6 ** j: 0.6, 0.36, 0.216, 0.13, 0.078."""
    request = build_request(0, [*range(20), *range(10)])
    assert propose(build_drafter(ForwardCost(step=1.0, row=0.1, context=0)), request) == {0: [10, 11, 12, 13]}
    gain = 0.6 + 0.36 + 0.216 + 0.1296 - 4 * 0.1
    for step, is_worth in [(1 + gain - 0.01, True), (1 + gain + 0.01, False)]:
        assert bool(propose(build_drafter(ForwardCost(step=step, row=0.1, context=0)), request)) == is_worth
    # two requests sample two tokens in 1.1 forwards of one, so a row costs 0.1 * 2 / 1.1 tokens
    other = build_request(1, [*range(20), *range(10)])
    assert propose(build_drafter(ForwardCost(step=1.0, row=0.1, context=0)), request, other) == {
        0: [10, 11, 12], 1: [10, 11, 12]
    }  # fmt: skip
    length = 30 / 1024
    for context, is_worth in [((gain - 0.01) / length, True), ((gain + 0.01) / length, False)]:
        assert bool(propose(build_drafter(ForwardCost(step=1, row=0.1, context=context)), request)) == is_worth


def test_drafts_that_are_always_wrong_end_after_a_few_and_return_when_the_reply_repeats_itself() -> None:
    cost = ForwardCost(step=1.1, row=0.1, context=0.0)
    drafter, request = build_drafter(cost), build_request(0, [1, 2, 3, 4, 5, 6], max_tokens=10_000)
    rng, num_wrong = random.Random(0), 0
    for _ in range(60):
        # the same three tokens, and never what followed them before
        request.extend([1, 2, 3], [-1.0] * 3, 0)
        num_wrong += bool(propose(drafter, request))
        request.extend([rng.randrange(100, 10_000)], [-1.0], 0)
    assert 1 <= num_wrong <= 10
    num_right = 0
    for _ in range(30):
        request.extend(list(range(40, 50)), [-1.0] * 10, 0)
        num_right += bool(propose(drafter, request))
    assert num_right >= 20


def test_searches_in_vain_become_rare_and_a_draft_makes_them_frequent_again() -> None:
    drafter, request = build_drafter(), build_request(0, list(range(1000, 1010)), max_tokens=10_000)
    num_searches = 0
    for token_id in range(300):
        if drafter.is_due([request]):
            num_searches += 1
            assert propose(drafter, request) == {}
        request.extend([token_id], [-1.0], 0)
    assert num_searches < 5 + 300 // MAX_WAIT + 1
    request.extend(list(range(1000, 1010)), [-1.0] * 10, 0)
    request.extend(list(range(1000, 1008)), [-1.0] * 8, 0)
    while not drafter.is_due([request]):
        pass
    assert propose(drafter, request)
    assert drafter.is_due([request])


def test_replies_are_forgotten_by_group_once_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunesmith.engine.core.drafts.MAX_REPLY_TOKENS", 20)
    drafter = build_drafter()
    for group in range(3):
        finished = build_request(group, [50, 51, 52], (group, 0))
        finished.extend([1, 2, 3, 4], [-1.0] * 4, 0)
        drafter.end(finished)
    requests = [build_request(10 + group, [50, 51, 52], (group, 1)) for group in range(3)]
    assert propose(drafter, *requests) == {11: [1, 2, 3], 12: [1, 2, 3]}
