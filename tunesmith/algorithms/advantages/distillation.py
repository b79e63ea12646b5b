"""On-policy distillation: a token's advantage is computed from the logprobs of teacher and policy.

Rewards are not read. Both divergences are between next-token distributions, at the contexts that the policy sampled.
Each advantage multiplies the gradient of the token's logprob such that the policy gradient of the divergence at a
token is unbiased.

Axes: E trained tokens of one update. s is the policy's logprob of the token as sampled, t is the teacher's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Field, PositiveFloat

from tunesmith.algorithms.scores import TokenInputs


def compute_distillation_terms(tokens: TokenInputs, *, kl_coef: PositiveFloat = 1.0) -> TokenInputs:
    """kl_coef (t - s): minimizes the reverse KL(policy || teacher) (Agarwal et al., 2024, on-policy distillation)."""
    teacher_E = _get_teacher(tokens)
    return _build_terms(tokens, kl_coef * (teacher_E - tokens.old_logprobs_E))


def compute_jsd_terms(
    tokens: TokenInputs, *, kl_coef: PositiveFloat = 1.0, beta: Annotated[float, Field(gt=0, le=1)] = 0.5
) -> TokenInputs:
    """kl_coef (log(beta e^t + (1 - beta) e^s) - s): minimizes a generalized Jensen-Shannon divergence.

    With T and S the distributions and M = beta T + (1 - beta) S, Agarwal et al. (2024, eq. 1) define
    JSD_beta = beta KL(T || M) + (1 - beta) KL(S || M). Its derivative by S's probability of a token is
    (1 - beta) log(S / M), so minus that, at sampled tokens, is the exact gradient over the whole vocabulary in
    expectation. The factor 1 - beta is left out: at beta = 1 this is the reverse KL of `compute_distillation_terms`.
    The advantage is positive exactly where the teacher's probability of the token is above the policy's.
    """
    teacher_E, student_E = _get_teacher(tokens), tokens.old_logprobs_E
    log_policy_weight = math.log1p(-beta) if beta < 1 else -math.inf
    mixture_E = np.logaddexp(math.log(beta) + teacher_E, log_policy_weight + student_E)
    return _build_terms(tokens, kl_coef * (mixture_E - student_E))


def _get_teacher(tokens: TokenInputs) -> np.ndarray:
    assert tokens.teacher_logprobs_E is not None
    return tokens.teacher_logprobs_E


def _build_terms(tokens: TokenInputs, advantages_E: np.ndarray) -> TokenInputs:
    gap_E = tokens.old_logprobs_E - _get_teacher(tokens)
    metrics = {"distillation/reverse_kl": float(gap_E.mean()) if len(gap_E) else 0.0}
    return replace(tokens, advantages_E=advantages_E, metrics=metrics)
