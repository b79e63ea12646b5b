"""Penalties of positions of replies against the plain formula, token by token."""

from __future__ import annotations

import random

import pytest
import torch

from tunesmith.model.forward.distribution import TokenContext, build_adjustment
from tunesmith.types import Distribution

VOCAB_SIZE = 23
PENALTIES = [
    Distribution(repetition_penalty=1.3),
    Distribution(presence_penalty=0.4),
    Distribution(frequency_penalty=-0.2),
    Distribution(repetition_penalty=0.8, presence_penalty=0.4, frequency_penalty=0.2),
    Distribution(),
]


def build_contexts(rng: random.Random) -> list[TokenContext]:
    """Positions of several replies: from the beginning, from the middle, with gaps, and single ones."""
    contexts = []
    for _ in range(rng.randint(1, 5)):
        prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 6)))
        reply = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 12)))
        distribution = rng.choice(PENALTIES)
        positions = sorted(rng.sample(range(len(reply) + 1), rng.randint(1, len(reply) + 1)))
        contexts += [
            TokenContext(distribution=distribution, prompt_ids=prompt, output_ids=reply, num_outputs=position)
            for position in positions
        ]
    return contexts


def adjust_plainly(logits: list[float], context: TokenContext) -> list[float]:
    distribution, reply = context.distribution, context.output_ids[: context.num_outputs]
    adjusted = list(logits)
    for token in range(VOCAB_SIZE):
        if distribution.repetition_penalty != 1 and (token in reply or token in context.prompt_ids):
            factor = distribution.repetition_penalty
            adjusted[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        if token in reply:
            adjusted[token] -= distribution.presence_penalty + distribution.frequency_penalty * reply.count(token)
    return adjusted


@pytest.mark.parametrize("seed", range(40))
def test_penalties_of_many_positions_are_those_of_each(seed):
    contexts = build_contexts(random.Random(seed))
    logits = torch.randn(len(contexts), VOCAB_SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    expected = [adjust_plainly(row, context) for row, context in zip(logits.tolist(), contexts, strict=True)]
    adjustment = build_adjustment(contexts, torch.device("cpu"))
    if adjustment is None:
        assert expected == logits.tolist()
        return
    assert adjustment.apply(logits).tolist() == expected
    pairs = list(zip(*adjustment.penalized_2P.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)
