"""Calls in flight whose tokens the engine keeps."""

from __future__ import annotations

from tunesmith.rollout.recording.open_turn import OpenTurn
from tunesmith.types import Completion, DeferredTokens, Sampling


def test_versions_include_tokens_that_the_engine_has_kept() -> None:
    call = OpenTurn(prompt_ids=(1,), sampling=Sampling(max_tokens=8), deferred=DeferredTokens(print))
    assert call.deferred is not None
    assert call.list_versions() == []
    kept = Completion(sampled_ids=(5, 6), logprobs=(-1.0, -2.0), policy_versions=(3, 4), stop_reason="cancelled")
    call.deferred.read = lambda: kept
    assert call.list_versions() == [3, 4]
    assert call.to_turn().policy_versions == (3, 4)


def test_tokens_of_a_kept_cache_have_the_version_of_the_first() -> None:
    call = OpenTurn(prompt_ids=(1,), sampling=Sampling(max_tokens=8))
    assert call.find_version(2, keeps_cache=True) == 2
    call.add([5], [-1.0], None, policy_version=2)
    assert call.find_version(3, keeps_cache=True) == 2
    assert call.find_version(3, keeps_cache=False) == 3
