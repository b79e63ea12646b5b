"""Spans of distributions, from one distribution a token and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from tunesmith.types import Distribution, DistributionSpan, Sample


def build_spans(distributions: Sequence[Distribution | None]) -> tuple[DistributionSpan, ...]:
    """Runs of tokens of one distribution; None is in no span."""
    spans, start = [], 0
    for distribution, run in groupby(distributions):
        end = start + len(list(run))
        if distribution is not None:
            spans.append(DistributionSpan(start=start, end=end, distribution=distribution))
        start = end
    return tuple(spans)


def list_distributions(sample: Sample) -> list[Distribution | None]:
    """The distribution of each token."""
    found: list[Distribution | None] = [None] * len(sample.token_ids)
    for span in sample.distribution_spans:
        found[span.start : span.end] = [span.distribution] * (span.end - span.start)
    return found
