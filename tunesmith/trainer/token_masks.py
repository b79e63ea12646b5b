"""Masks of tokens that were sampled under a grammar, computed again from the grammar and the ids of their turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tunesmith.errors import TrainingError
from tunesmith.grammar.matcher import GrammarCompiler
from tunesmith.types import DistributionSpan, Sample


def attach_token_masks(samples: Sequence[Sample], grammars: GrammarCompiler | None) -> Sequence[Sample]:
    """The samples, with masks in every span that has a grammar."""
    if not any(span.distribution.grammar for sample in samples for span in sample.distribution_spans):
        return samples
    if grammars is None:
        raise TrainingError("tokens were sampled under a grammar: pass the engine's `grammars` to the trainer")
    return [
        replace(sample, distribution_spans=tuple(_attach(span, sample, grammars) for span in sample.distribution_spans))
        for sample in samples
    ]


def _attach(span: DistributionSpan, sample: Sample, grammars: GrammarCompiler) -> DistributionSpan:
    if not span.distribution.grammar:
        return span
    token_ids = sample.token_ids[span.start : span.end]
    try:
        return replace(span, token_masks=grammars.compute_masks(span.distribution.grammar, token_ids))
    except ValueError as error:
        raise TrainingError(
            f"a reply cannot be scored under the grammar that it was sampled with ({error}): the tokenizer or the "
            "version of llguidance has changed since"
        ) from error
