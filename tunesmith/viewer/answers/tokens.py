"""A trajectory as tokens: text, logprob, mask, advantage and policy version of each, by conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunesmith.experience.samples import chain_turns
from tunesmith.types import Turn
from tunesmith.viewer.reading.run import StoredRollout
from tunesmith.viewer.reading.token_text import TokenText

CONTEXT, TRAINED, UNTRAINED = 0, 1, 2
"""Masks: not sampled here; sampled and trained; sampled and excluded from training."""


def build_tokens(stored: StoredRollout, text: TokenText | None) -> list[dict[str, Any]]:
    """One entry for each conversation: lists with one value per token, null where a token was not sampled."""
    turns = stored.trajectory.turns
    index_of = {id(turn): index for index, turn in enumerate(turns)}
    return [list_tokens(chain, [index_of[id(turn)] for turn in chain], stored, text) for chain in chain_turns(turns)]


def list_tokens(
    chain: Sequence[Turn], indices: Sequence[int], stored: StoredRollout, text: TokenText | None
) -> dict[str, Any]:
    ids = chain[-1].prompt_ids + chain[-1].sampled_ids
    masks: list[int] = [CONTEXT] * len(ids)
    logprobs: list[float | None] = [None] * len(ids)
    advantages: list[float | None] = [None] * len(ids)
    versions: list[int | None] = [None] * len(ids)
    for index, turn in zip(indices, chain, strict=True):
        start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.sampled_ids)
        is_trained = turn.is_trained and stored.advantage is not None
        advantage = stored.turn_advantages[index] if stored.turn_advantages else stored.advantage
        masks[start:end] = [TRAINED if is_trained else UNTRAINED] * (end - start)
        logprobs[start:end] = [round(value, 5) for value in turn.logprobs]
        advantages[start:end] = [advantage if is_trained else None] * (end - start)
        versions[start:end] = turn.policy_versions
    return {
        "text": [f"<{token_id}>" for token_id in ids] if text is None else text.split(ids),
        "id": list(ids),
        "mask": masks,
        "logprob": logprobs,
        "advantage": advantages,
        "version": versions,
    }
