"""Policy versions that sampled the tokens of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tunesmith.cluster.ranks import Ranks
from tunesmith.trainer.batch import EventIndex
from tunesmith.types import Sample


def has_older_tokens(samples: Sequence[Sample], newest_version: int | None) -> bool:
    """Whether a policy version before the newest sampled a token of the samples."""
    newest = find_newest_version(samples) if newest_version is None else newest_version
    return any(version < newest for version in find_versions(samples))


def find_newest_version(samples: Sequence[Sample]) -> int:
    """The newest policy version that sampled a token; 0 if there is none."""
    return max(find_versions(samples), default=0)


def gather_versions(samples: Sequence[Sample], ranks: Ranks, newest: int | None) -> tuple[int, list[int] | None]:
    """The newest policy version of a step, and the groups of its samples; no groups on a single rank.

    `newest` is the version if it is known, the same on all ranks; else it is that of all ranks' samples.
    """
    found = find_newest_version(samples) if newest is None else newest
    if ranks.is_alone:
        return found, None
    gathered = ranks.all_gather_objects((found, [sample.group_index for sample in samples]))
    return max(each for each, _ in gathered), sorted({group for _, part in gathered for group in part})


def find_versions(samples: Sequence[Sample]) -> set[int]:
    """Policy versions that sampled tokens of the samples."""
    return {
        version
        for sample in samples
        if not sample.is_expert
        for version in sample.policy_versions
        if version is not None
    }


def find_newest(samples: Sequence[Sample], events: EventIndex, newest_version: int | None) -> np.ndarray:
    """1.0 [E] where the newest policy version sampled the token; 0.0 for expert tokens."""
    version_E = events.gather([sample.policy_versions for sample in samples])
    version_E[np.asarray([sample.is_expert for sample in samples], dtype=bool)[events.sample_E]] = np.nan
    if newest_version is None:
        newest_version = int(np.nanmax(version_E, initial=-1))
    return (version_E == newest_version).astype(np.float64)
