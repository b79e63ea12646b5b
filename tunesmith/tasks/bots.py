"""BOTS: each task's pass rate as a Beta posterior, and the tasks whose pass rate is nearest to a target come next.

After Shen et al., 2025, "BOTS: A Unified Framework for Bayesian Online Task Selection in LLM Reinforcement Finetuning"
(arXiv:2510.26374). Feedback on the tasks of a step is explicit evidence; what it says of the model's capability, read
off the reference models' pass rates, is implicit evidence for all other tasks. Old evidence decays, because the model
changes. All of it is a few passes over arrays.

Axes: N tasks, J tasks with feedback, C candidates, K feature columns, B bins.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveInt

from tunesmith.tasks.references import References
from tunesmith.tasks.selector import Choice, Floats, Indices, Selection

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveCount = Annotated[float, Field(gt=0, allow_inf_nan=False)]

CAPABILITY_MEMORY = 0.9
"""Share of the last capability in the next."""
SURPRISE = 0.25
"""Mean error of a step's predictions from which an adaptive rho is halved."""
NUM_BINS = 10
ARRAYS = {"alpha": "<f8", "beta": "<f8", "num_selected": "<i4", "num_selected_in_epoch": "<i4"}
"""The arrays of the state and their types, little-endian on every machine."""


class BotsSelector:
    """Beta(alpha, beta) of every task, and the capability and trust that carry evidence to tasks not tried.

    m            pseudo-counts of one feedback; about the number of runs of a task
    lamb         share of old evidence that a step forgets; the posterior decays to the prior
    rho          share of the pseudo-counts that predictions get, trusted less than feedback
    adaptive_rho halve rho for good when predictions are off by 0.25 or more
    target_reward  the pass rate looked for: 0.5 has most variance; higher suits models that learn from success
    tau          temperature of the choice among scores; 0 takes the best
    do_sample    Thompson sampling: score a draw from the posterior, so that little-known tasks get their chance
    prior_count  pseudo-counts that the mean of the features is worth before any feedback; 0 is the uniform prior
    max_repeats  most times a task is selected in one epoch (as many draws as there are tasks); None has no limit
    max_candidates  with do_sample, at most about so many tasks, drawn anew each time, are looked at in a selection
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
        self._references = References(features_NK)
        expected_N = features_NK.mean(axis=1) if features_NK.shape[1] else np.zeros(self.num_tasks)
        strength = prior_count if features_NK.shape[1] else 0.0
        self._prior_alpha = 1.0 + strength * expected_N
        self._prior_beta = 1.0 + strength * (1.0 - expected_N)
        self.alpha = self._prior_alpha.copy()
        self.beta = self._prior_beta.copy()
        self._num_selected = np.zeros(self.num_tasks, dtype=np.int32)
        self._num_selected_in_epoch = np.zeros(self.num_tasks, dtype=np.int32)
        self._choices: tuple[Choice, ...] = ()
        self._awaited: list[int] = []

    def select(self, batch_size: int) -> list[int]:
        """The tasks with the best scores, best first; different ones until there are no more.

        Tasks that were selected since the last feedback come last: nothing new is known of them.
        """
        chosen: list[int] = []
        choices: list[Choice] = []
        while len(chosen) < batch_size:
            left_in_epoch = self.num_tasks - self.num_drawn % self.num_tasks
            picked = self._select_within_epoch(min(batch_size - len(chosen), left_in_epoch), avoided=chosen)
            choices += picked
            chosen += [choice.index for choice in picked]
        self._choices = tuple(choices)
        self._awaited += chosen
        return chosen

    def feedback(self, indices: Sequence[int], pass_rates: Sequence[float]) -> dict[str, float]:
        """Update every posterior; a task that occurs twice counts once, with its mean."""
        self._awaited = []
        if not len(indices):
            return self._compute_metrics()
        index_J, rate_J = average_repeated(indices, pass_rates)
        located = self._references.locate(index_J, float(rate_J.mean()))
        if located is not None:
            old = located if self.capability is None else self.capability
            self.capability = located if self.capability is None else _blend(old, located)
        metrics = {"selector/feedback_mean": float(rate_J.mean()), "selector/num_feedback": float(len(index_J))}
        evidence_N = None if self.capability is None else self._references.predict(self.capability)
        if evidence_N is not None:
            error = float(np.abs(evidence_N[index_J] - rate_J).mean())
            metrics["selector/prediction_error"] = error
            if self._adaptive_rho and error >= SURPRISE:
                self.rho *= 0.5
        self._update(index_J, rate_J, evidence_N)
        return metrics | self._compute_metrics()

    def explain(self) -> Selection:
        """What the last `select` chose and why, and how the expected pass rates of all tasks are spread."""
        mean_N = self.alpha / (self.alpha + self.beta)
        bin_N = np.minimum((mean_N * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        return Selection(
            choices=self._choices,
            summary=self._compute_metrics(),
            histogram=tuple(np.bincount(bin_N, minlength=NUM_BINS).tolist()),
        )

    def state_dict(self) -> dict[str, Any]:
        arrays = {name: base64.b64encode(self._array(name).astype(kind).tobytes()) for name, kind in ARRAYS.items()}
        return {
            "num_drawn": self.num_drawn,
            "rho": self.rho,
            "capability": self.capability,
            "awaited": self._awaited,
            **{name: text.decode("ascii") for name, text in arrays.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, kind in ARRAYS.items():
            loaded = np.frombuffer(base64.b64decode(state[name]), dtype=kind)
            if len(loaded) != self.num_tasks:
                raise ValueError(f"the selector's state is of {len(loaded)} tasks, the data set has {self.num_tasks}")
            self._array(name)[:] = loaded
        self.num_drawn, self.rho, self.capability = state["num_drawn"], state["rho"], state["capability"]
        self._awaited = list(state["awaited"])

    def _array(self, name: str) -> NDArray[Any]:
        return {
            "alpha": self.alpha,
            "beta": self.beta,
            "num_selected": self._num_selected,
            "num_selected_in_epoch": self._num_selected_in_epoch,
        }[name]

    def _select_within_epoch(self, size: int, *, avoided: Sequence[int]) -> list[Choice]:
        rng = np.random.default_rng((self._seed, self.num_drawn))
        if self.num_drawn % self.num_tasks == 0:
            self._num_selected_in_epoch[:] = 0
        candidate_C = self._find_candidates(size, avoided, rng)
        everything = slice(None) if candidate_C is None else candidate_C
        alpha_C, beta_C = self.alpha[everything], self.beta[everything]
        rate_C = rng.beta(alpha_C, beta_C) if self._do_sample else alpha_C / (alpha_C + beta_C)
        score_C = np.abs(rate_C - self._target)
        np.negative(score_C, out=score_C)
        if self._tau > 0:
            score_C /= self._tau
            score_C -= np.log(rng.standard_exponential(len(score_C)))
        place_J = find_largest(score_C, size, rng)
        index_J = place_J if candidate_C is None else candidate_C[place_J]
        self.num_drawn += size
        self._num_selected[index_J] += 1
        self._num_selected_in_epoch[index_J] += 1
        return [self._explain_choice(int(i), float(rate)) for i, rate in zip(index_J, rate_C[place_J], strict=True)]

    def _find_candidates(self, size: int, avoided: Sequence[int], rng: np.random.Generator) -> Indices | None:
        """Tasks that may be chosen, at least `size` of them; None says all of them."""
        is_sampled = self._do_sample and self.num_tasks > self._max_candidates
        if not is_sampled and self._max_repeats is None and not avoided and not self._awaited:
            return None
        is_open_N = np.ones(self.num_tasks, dtype=bool)
        if self._max_repeats is not None:
            is_open_N = self._num_selected_in_epoch < self._max_repeats
        for left_out in ([*self._awaited, *avoided], avoided):
            fresh_N = is_open_N.copy()
            fresh_N[list(left_out)] = False
            if np.count_nonzero(fresh_N) >= size:
                is_open_N = fresh_N
                break
        num_open = np.count_nonzero(is_open_N)
        assert num_open >= size, "an epoch has room for as many draws as there are tasks"
        num_wanted = max(self._max_candidates, 4 * size)
        if is_sampled and num_open > num_wanted:
            drawn_N = is_open_N & (rng.random(self.num_tasks, dtype=np.float32) < num_wanted / num_open)
            if np.count_nonzero(drawn_N) >= size:
                is_open_N = drawn_N
        return np.flatnonzero(is_open_N)

    def _update(self, index_J: Indices, rate_J: Floats, evidence_N: Floats | None) -> None:
        """alpha <- (1 - lamb) alpha + lamb prior + m ((1 - rho) seen + rho predicted), and beta in mirror image."""
        keep, prior, predicted = 1.0 - self._lamb, self._lamb, self.rho * self._m
        self.alpha *= keep
        self.alpha += prior * self._prior_alpha
        self.beta *= keep
        self.beta += prior * self._prior_beta
        seen = self._m - predicted
        if evidence_N is None:
            seen = self._m
        else:
            evidence_N[index_J] = rate_J
            evidence_N *= predicted
            self.alpha += evidence_N
            self.beta -= evidence_N
            self.beta += predicted
        self.alpha[index_J] += seen * rate_J
        self.beta[index_J] += seen * (1.0 - rate_J)

    def _explain_choice(self, index: int, rate: float) -> Choice:
        alpha, beta = float(self.alpha[index]), float(self.beta[index])
        what = "a draw from its posterior" if self._do_sample else "its expected pass rate"
        among = "near" if self._tau == 0 else f"by chance (tau {self._tau:g}) near"
        return Choice(
            index=index,
            reason=f"{what}, {rate:.3f}, is {among} the target {self._target:g}",
            numbers={
                "alpha": alpha,
                "beta": beta,
                "expected_pass_rate": alpha / (alpha + beta),
                "scored_pass_rate": rate,
                "num_selected": float(self._num_selected[index]),
            },
        )

    def _compute_metrics(self) -> dict[str, float]:
        mean_N = self.alpha / (self.alpha + self.beta)
        metrics = {
            "selector/expected_pass_rate": float(mean_N.mean()),
            "selector/mean_count": float(self.alpha.mean() + self.beta.mean()),
            "selector/num_tasks_tried": float(np.count_nonzero(self._num_selected)),
            "selector/rho": self.rho,
        }
        if self.capability is not None:
            metrics["selector/capability"] = self.capability
        return metrics


def average_repeated(indices: Sequence[int], pass_rates: Sequence[float]) -> tuple[Indices, Floats]:
    """Each task once, with the mean of its pass rates, clipped to [0, 1]."""
    rates = np.asarray(pass_rates, dtype=np.float64)
    if not np.isfinite(rates).all():
        raise ValueError("a pass rate is not a number; leave tasks without scored runs out of the feedback")
    index_J, place, count_J = np.unique(np.asarray(indices, dtype=np.int64), return_inverse=True, return_counts=True)
    return index_J, np.bincount(place, weights=np.clip(rates, 0.0, 1.0)) / count_J


def find_largest(values: Floats, size: int, rng: np.random.Generator) -> Indices:
    """Places of the `size` largest values, largest first; among equals at the border chance decides."""
    border = np.partition(values, len(values) - size)[len(values) - size]
    above = np.flatnonzero(values > border)
    above = above[np.argsort(-values[above], kind="stable")]
    equal = np.flatnonzero(values == border)
    return np.concatenate([above, rng.choice(equal, size - len(above), replace=False)])


def _blend(old: float, new: float) -> float:
    return CAPABILITY_MEMORY * old + (1.0 - CAPABILITY_MEMORY) * new
