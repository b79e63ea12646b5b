"""BOTS task selection: a Beta posterior over each task's pass rate; tasks nearest to a target pass rate are selected.

After Shen et al., 2025, "BOTS: A Unified Framework for Bayesian Online Task Selection in LLM Reinforcement Finetuning"
(arXiv:2510.26374). Feedback on the tasks of a step is explicit evidence. It also gives an estimate of the model's
capability relative to reference models, and the pass rates predicted from it are implicit evidence for all other tasks.
Old evidence decays, because the model changes. Everything is vectorized over tasks.

Axes: N tasks, J tasks with feedback, C candidates, K feature columns or knots, B bins.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveInt

from tunesmith.tasks.selector import Choice, Floats, Indices, Selection, Share, build_histogram

MIN_GAP = 1e-3
"""Minimum difference of the mean pass rates of two knots on the given tasks; below it the capability is not estimated.
The paper divides by such differences, or by negative ones, and gets capabilities of 1e5 that take a hundred steps to
decay."""
EPSILON = 1e-6


class ReferencePassRates:
    """Predicts the pass rate of a task as a piecewise linear function of the trained model's capability c.

    The reference models, from weakest to strongest, are the knots at c = 0, 1, ... Two columns w and s give the line
    w + c (s - w) of BOTS. One column is put between knots of 0 and 1 ("solves nothing" and "solves everything");
    without columns these are the only knots. As in the paper c is unbounded: the first and the last segment are
    extrapolated, and only predicted pass rates are clipped.
    """

    def __init__(self, features: NDArray[np.float64]) -> None:
        num_tasks, num_columns = features.shape
        order = np.argsort(features.mean(axis=0), kind="stable")
        knots: list[Any] = [np.ascontiguousarray(features[:, column]) for column in order]
        if num_columns < 2:
            knots = [np.zeros(num_tasks), *knots, np.ones(num_tasks)]
        self._knots = knots

    def estimate_capability(self, index_J: NDArray[np.int64], mean_pass_rate: float) -> float | None:
        """The capability at which the mean on these tasks is `mean_pass_rate`; None if the knots are too close."""
        mean_K = np.maximum.accumulate([knot[index_J].mean() for knot in self._knots])
        segment = int(np.clip(np.searchsorted(mean_K, mean_pass_rate, side="right") - 1, 0, len(mean_K) - 2))
        gap = mean_K[segment + 1] - mean_K[segment]
        if gap < MIN_GAP:
            return None
        return float(segment + (mean_pass_rate - mean_K[segment]) / (gap + EPSILON))

    def predict(self, capability: float) -> NDArray[np.float64]:
        """The predicted pass rate of every task at a capability, as a new array."""
        segment = int(np.clip(np.floor(capability), 0, len(self._knots) - 2))
        predicted_N = self._knots[segment + 1] - self._knots[segment]
        predicted_N *= capability - segment
        predicted_N += self._knots[segment]
        return np.clip(predicted_N, 0.0, 1.0, out=predicted_N)


Count = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveCount = Annotated[float, Field(gt=0, allow_inf_nan=False)]

CAPABILITY_EMA_DECAY = 0.9
"""Weight of the old value in the moving average of the capability."""
HALVING_ERROR = 0.25
"""Mean absolute prediction error of a step at or above which an adaptive rho is halved."""
ARRAYS = {"alpha": "<f8", "beta": "<f8", "num_selected": "<i4", "num_selected_in_epoch": "<i4"}
"""The arrays of the state and their types, little-endian on every machine."""


class BotsSelector:
    """Beta(alpha, beta) posterior of every task, and the capability and rho that carry evidence to untried tasks.

    m            pseudo-counts of one feedback; about the number of rollouts of a task
    lamb         share of old evidence forgotten per step; the posterior decays to the prior
    rho          share of the pseudo-counts given to predictions instead of feedback
    adaptive_rho halve rho permanently when the mean prediction error of a step is 0.25 or more
    target_reward  the target pass rate: 0.5 has the largest variance; higher suits models that learn from success
    tau          softmax temperature over scores; 0 takes the best
    do_sample    Thompson sampling: score a draw from the posterior, so that uncertain tasks are explored
    prior_count  pseudo-counts of the mean of the features in the prior; 0 is the uniform prior
    max_repeats  largest number of selections of a task in one epoch (as many draws as tasks); None has no limit
    max_candidates  with do_sample, about this many random tasks are scored in a selection, redrawn each time
    """

    def __init__(
        self,
        features_NK: Floats,
        *,
        seed: int,
        m: PositiveCount = 16.0,
        lamb: Share = 0.2,
        rho: Share = 0.2,
        adaptive_rho: bool = False,
        target_reward: Share = 1.0,
        tau: NonNegativeFloat = 1.0,
        do_sample: bool = False,
        prior_count: Count = 4.0,
        max_repeats: PositiveInt | None = None,
        max_candidates: PositiveInt = 2**17,
    ) -> None:
        self.num_tasks = len(features_NK)
        self.num_drawn = 0
        self.rho = float(rho)
        self.capability: float | None = None
        self._seed, self._m, self._lamb = seed, m, lamb
        self._adaptive_rho, self._target, self._tau, self._do_sample = adaptive_rho, target_reward, tau, do_sample
        self._max_repeats, self._max_candidates = max_repeats, max_candidates
        self._references = ReferencePassRates(features_NK)
        expected_N = features_NK.mean(axis=1) if features_NK.shape[1] else np.zeros(self.num_tasks)
        strength = prior_count if features_NK.shape[1] else 0.0
        self._prior_alpha = 1.0 + strength * expected_N
        self._prior_beta = 1.0 + strength * (1.0 - expected_N)
        self.alpha = self._prior_alpha.copy()
        self.beta = self._prior_beta.copy()
        self.num_selected = np.zeros(self.num_tasks, dtype=np.int32)
        self.num_selected_in_epoch = np.zeros(self.num_tasks, dtype=np.int32)
        self._choices: tuple[Choice, ...] = ()
        self._pending: list[int] = []

    def select(self, batch_size: int) -> list[int]:
        """The tasks with the best scores, best first; a task repeats only when the batch exceeds the data set.

        Tasks selected since the last feedback come last, because no new evidence about them has arrived.
        """
        chosen: list[int] = []
        choices: list[Choice] = []
        while len(chosen) < batch_size:
            left_in_epoch = self.num_tasks - self.num_drawn % self.num_tasks
            picked = self._select_within_epoch(min(batch_size - len(chosen), left_in_epoch), excluded=chosen)
            choices += picked
            chosen += [choice.index for choice in picked]
        self._choices = tuple(choices)
        self._pending += chosen
        return chosen

    def feedback(self, indices: Sequence[int], pass_rates: Sequence[float]) -> dict[str, float]:
        """Update every posterior; a task that occurs several times counts once, with its mean."""
        self._pending = []
        if not len(indices):
            return self._compute_metrics()
        index_J, rate_J = average_repeated(indices, pass_rates)
        estimate = self._references.estimate_capability(index_J, float(rate_J.mean()))
        if estimate is not None:
            decay = 0.0 if self.capability is None else CAPABILITY_EMA_DECAY
            self.capability = decay * (self.capability or 0.0) + (1.0 - decay) * estimate
        metrics = {"selector/feedback_mean": float(rate_J.mean()), "selector/num_feedback": float(len(index_J))}
        evidence_N = None if self.capability is None else self._references.predict(self.capability)
        if evidence_N is not None:
            error = float(np.abs(evidence_N[index_J] - rate_J).mean())
            metrics["selector/prediction_error"] = error
            if self._adaptive_rho and error >= HALVING_ERROR:
                self.rho *= 0.5
        self._update(index_J, rate_J, evidence_N)
        return metrics | self._compute_metrics()

    def explain(self) -> Selection:
        """The choices of the last `select` with their reasons, and a histogram of expected pass rates of all tasks."""
        histogram = build_histogram(self.alpha / (self.alpha + self.beta))
        return Selection(choices=self._choices, summary=self._compute_metrics(), histogram=histogram)

    def state_dict(self) -> dict[str, Any]:
        arrays = {name: base64.b64encode(getattr(self, name).astype(kind).tobytes()) for name, kind in ARRAYS.items()}
        return {
            "num_drawn": self.num_drawn,
            "rho": self.rho,
            "capability": self.capability,
            "awaited": self._pending,
            **{name: text.decode("ascii") for name, text in arrays.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, kind in ARRAYS.items():
            loaded = np.frombuffer(base64.b64decode(state[name]), dtype=kind)
            if len(loaded) != self.num_tasks:
                raise ValueError(f"the selector's state has {len(loaded)} tasks, the data set has {self.num_tasks}")
            getattr(self, name)[:] = loaded
        self.num_drawn, self.rho, self.capability = state["num_drawn"], state["rho"], state["capability"]
        self._pending = list(state["awaited"])

    def _select_within_epoch(self, size: int, *, excluded: Sequence[int]) -> list[Choice]:
        rng = np.random.default_rng((self._seed, self.num_drawn))
        if self.num_drawn % self.num_tasks == 0:
            self.num_selected_in_epoch[:] = 0
        candidate_C = self._find_candidates(size, excluded, rng)
        alpha_C, beta_C = self.alpha[candidate_C], self.beta[candidate_C]
        rate_C = rng.beta(alpha_C, beta_C) if self._do_sample else alpha_C / (alpha_C + beta_C)
        score_C = np.abs(rate_C - self._target)
        np.negative(score_C, out=score_C)
        if self._tau > 0:
            score_C /= self._tau
            score_C -= np.log(rng.standard_exponential(len(score_C)))
        position_J = find_largest(score_C, size, rng)
        index_J = candidate_C[position_J]
        self.num_drawn += size
        self.num_selected[index_J] += 1
        self.num_selected_in_epoch[index_J] += 1
        return [self._explain_choice(int(i), float(rate)) for i, rate in zip(index_J, rate_C[position_J], strict=True)]

    def _find_candidates(self, size: int, excluded: Sequence[int], rng: np.random.Generator) -> Indices:
        """Tasks that may be selected, at least `size` of them.

        Excludes tasks without feedback since their last selection and tasks in `excluded` while enough others are left.
        """
        is_open_N = np.ones(self.num_tasks, dtype=bool)
        if self._max_repeats is not None:
            is_open_N = self.num_selected_in_epoch < self._max_repeats
        for indices in ([*self._pending, *excluded], excluded):
            is_left_N = is_open_N.copy()
            is_left_N[list(indices)] = False
            if np.count_nonzero(is_left_N) >= size:
                is_open_N = is_left_N
                break
        num_open = np.count_nonzero(is_open_N)
        assert num_open >= size, "an epoch has as many draws as tasks"
        num_wanted = max(self._max_candidates, 4 * size)
        if self._do_sample and num_open > num_wanted:
            drawn_N = is_open_N & (rng.random(self.num_tasks, dtype=np.float32) < num_wanted / num_open)
            if np.count_nonzero(drawn_N) >= size:
                is_open_N = drawn_N
        return np.flatnonzero(is_open_N)

    def _update(self, index_J: Indices, rate_J: Floats, evidence_N: Floats | None) -> None:
        """alpha <- (1 - lamb) alpha + lamb prior + m ((1 - rho) observed + rho predicted); beta with 1 - pass rate.

        `evidence_N` holds the predicted pass rates and is overwritten.
        """
        keep, prior, predicted = 1.0 - self._lamb, self._lamb, self.rho * self._m
        self.alpha *= keep
        self.alpha += prior * self._prior_alpha
        self.beta *= keep
        self.beta += prior * self._prior_beta
        observed = self._m if evidence_N is None else self._m - predicted
        if evidence_N is not None:
            evidence_N[index_J] = rate_J
            evidence_N *= predicted
            self.alpha += evidence_N
            self.beta -= evidence_N
            self.beta += predicted
        self.alpha[index_J] += observed * rate_J
        self.beta[index_J] += observed * (1.0 - rate_J)

    def _explain_choice(self, index: int, rate: float) -> Choice:
        alpha, beta = float(self.alpha[index]), float(self.beta[index])
        quantity = "pass rate drawn from the posterior" if self._do_sample else "expected pass rate"
        how = "near" if self._tau == 0 else f"sampled with tau {self._tau:g} near"
        return Choice(
            index=index,
            reason=f"{quantity} {rate:.3f}, {how} the target {self._target:g}",
            numbers={
                "alpha": alpha,
                "beta": beta,
                "expected_pass_rate": alpha / (alpha + beta),
                "scored_pass_rate": rate,
                "num_selected": float(self.num_selected[index]),
            },
        )

    def _compute_metrics(self) -> dict[str, float]:
        mean_N = self.alpha / (self.alpha + self.beta)
        metrics = {
            "selector/expected_pass_rate": float(mean_N.mean()),
            "selector/mean_count": float(self.alpha.mean() + self.beta.mean()),
            "selector/num_tasks_tried": float(np.count_nonzero(self.num_selected)),
            "selector/rho": self.rho,
        }
        if self.capability is not None:
            metrics["selector/capability"] = self.capability
        return metrics


def average_repeated(indices: Sequence[int], pass_rates: Sequence[float]) -> tuple[Indices, Floats]:
    """Unique tasks with the mean of their pass rates, each clipped to [0, 1]."""
    rates = np.asarray(pass_rates, dtype=np.float64)
    if not np.isfinite(rates).all():
        raise ValueError("a pass rate is not a number; leave tasks without scored rollouts out of the feedback")
    index_J, inverse, count_J = np.unique(np.asarray(indices, dtype=np.int64), return_inverse=True, return_counts=True)
    return index_J, np.bincount(inverse, weights=np.clip(rates, 0.0, 1.0)) / count_J


def find_largest(values: Floats, size: int, rng: np.random.Generator) -> Indices:
    """Positions of the `size` largest values, largest first; ties at the smallest of them are broken at random."""
    threshold = np.partition(values, len(values) - size)[len(values) - size]
    above = np.flatnonzero(values > threshold)
    above = above[np.argsort(-values[above], kind="stable")]
    equal = np.flatnonzero(values == threshold)
    return np.concatenate([above, rng.choice(equal, size - len(above), replace=False)])
