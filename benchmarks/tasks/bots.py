"""BOTS: the time of one selection and update, and the rollouts that it saves a simulated learner.

    python -m benchmarks.tasks.bots speed --num-tasks 1000000
    python -m benchmarks.tasks.bots simulate --seeds 5

`speed` times `select` and `feedback` together on one core. `simulate` trains learners on a graded set in which most
tasks are too easy or too hard: a task is solved with probability sigmoid(ability - difficulty), and an ability grows
with the groups of its skill in proportion to the standard deviation of their rewards, a model of the policy gradient.
Random batches and BOTS get the same number of rollouts. The figure is the rollouts of random sampling over those that
BOTS needs to reach its final held-out accuracy. It measures the selector, not the gain of a real model.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.shared.report import publish
from tunesmith.tasks.bots import BotsSelector
from tunesmith.tasks.selector import RandomSelector, Selector

BATCH_SIZE, GROUP_SIZE = 16, 8
ARGS: dict[str, Any] = {"m": GROUP_SIZE, "lamb": 0.1, "rho": 0.1, "target_reward": 0.5, "tau": 0, "do_sample": True}
NUM_SKILLS = 6
NUM_HELD_OUT = 2000
SHARES, CENTRES = (0.45, 0.15, 0.40), (-6.0, 0.5, 7.0)
"""Shares of tasks that are too easy, within reach and too hard, and the centres of their difficulties."""
LEARNING_RATE = 0.12
REFERENCE_ABILITIES = (-1.0, 1.5)
"""Abilities of the reference models, whose pass rates are the features."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSet:
    """Simulated tasks: a difficulty and a skill each."""

    difficulty_N: NDArray[np.float64]
    skill_N: NDArray[np.int64]

    def compute_chances(self, ability_S: NDArray[np.float64]) -> NDArray[np.float64]:
        return 1 / (1 + np.exp(self.difficulty_N - ability_S[self.skill_N]))


def build_task_set(num_tasks: int, rng: np.random.Generator) -> TaskSet:
    kind_N = rng.choice(len(SHARES), size=num_tasks, p=SHARES)
    difficulty_N = np.asarray(CENTRES)[kind_N] + 1.5 * rng.standard_normal(num_tasks)
    return TaskSet(difficulty_N=difficulty_N, skill_N=rng.integers(NUM_SKILLS, size=num_tasks))


def train(
    selector: Selector, tasks: TaskSet, held_out: TaskSet, *, num_steps: int, seed: int
) -> list[dict[str, float]]:
    """History of one learner: rollouts so far, share of groups with variance, held-out accuracy."""
    rng = np.random.default_rng((seed, 1))
    ability_S = np.zeros(NUM_SKILLS)
    history = []
    for step in range(1, num_steps + 1):
        index_J = np.asarray(selector.select(BATCH_SIZE))
        rate_J = rng.binomial(GROUP_SIZE, tasks.compute_chances(ability_S)[index_J]) / GROUP_SIZE
        np.add.at(ability_S, tasks.skill_N[index_J], LEARNING_RATE * np.sqrt(rate_J * (1 - rate_J)))
        selector.feedback(index_J.tolist(), rate_J.tolist())
        history.append(
            {
                "rollouts": step * BATCH_SIZE * GROUP_SIZE,
                "share_with_variance": float(np.mean((rate_J > 0) & (rate_J < 1))),
                "accuracy": float(held_out.compute_chances(ability_S).mean()),
            }
        )
    return history


def simulate_one(seed: int, *, num_tasks: int, num_steps: int) -> dict[str, list[dict[str, float]]]:
    """Every selector on one task set."""
    rng = np.random.default_rng((seed, 0))
    tasks, held_out = build_task_set(num_tasks, rng), build_task_set(NUM_HELD_OUT, rng)
    references = [tasks.compute_chances(np.full(NUM_SKILLS, ability)) for ability in REFERENCE_ABILITIES]
    features_NK = np.stack([rng.binomial(16, chances) / 16 for chances in references], axis=1)
    selectors: dict[str, Selector] = {
        "random": RandomSelector(features_NK, seed=seed),
        "bots": BotsSelector(features_NK, seed=seed, **ARGS),
        "bots without features": BotsSelector(features_NK[:, :0], seed=seed, **ARGS),
    }
    return {name: train(each, tasks, held_out, num_steps=num_steps, seed=seed) for name, each in selectors.items()}


def find_share(history: list[dict[str, float]], accuracy: float) -> float | None:
    """Share of the rollouts after which the accuracy is first reached; None if it never is."""
    trained = [row for row in history if row["rollouts"]]
    reached = next((row["rollouts"] for row in trained if row["accuracy"] >= accuracy), None)
    return None if reached is None else reached / history[-1]["rollouts"]


def simulate(arguments: argparse.Namespace) -> None:
    runs = [
        simulate_one(seed, num_tasks=arguments.num_tasks or 5000, num_steps=arguments.steps)
        for seed in range(arguments.seeds)
    ]
    details: dict[str, dict[str, list[Any]]] = {}
    for name in runs[0]:
        last = [run[name][-1]["accuracy"] for run in runs]
        shares = [statistics.fmean(row["share_with_variance"] for row in run[name]) for run in runs]
        needed = [find_share(run[name], run["random"][-1]["accuracy"]) for run in runs]
        details[name] = {"accuracy": last, "share_with_variance": shares, "share_of_randoms_rollouts": needed}
        shown = ", ".join("never" if share is None else f"{share:.2f}" for share in needed)
        print(
            f"{name:<22} accuracy {statistics.fmean(last):.3f} ({min(last):.3f} to {max(last):.3f})  groups with "
            f"variance {statistics.fmean(shares):.2f}  share of rollouts to random's final accuracy: {shown}"
        )
    filled = [1.0 if share is None else share for share in details["bots"]["share_of_randoms_rollouts"]]
    ours = 1 / statistics.fmean(filled)
    publish(
        name="bots_simulated", unit="random's rollouts over ours at equal accuracy", ours=ours,
        peers={"random": 1.0}, device="cpu", details=details, out=arguments.out,
    )  # fmt: skip


def time_steps(selector: BotsSelector, num_tasks: int, *, num_repeats: int) -> list[float]:
    """Milliseconds of one selection with the update that follows."""
    rng = np.random.default_rng(0)
    times = []
    for _ in range(num_repeats):
        rates = rng.random(BATCH_SIZE).tolist()
        started = time.perf_counter()
        selector.feedback(selector.select(BATCH_SIZE), rates)
        times.append(1e3 * (time.perf_counter() - started))
    return times


def measure_speed(arguments: argparse.Namespace) -> None:
    num_tasks = arguments.num_tasks or 1_000_000
    rng = np.random.default_rng(0)
    weak_N = rng.random(num_tasks)
    features_NK = np.stack([weak_N, weak_N + (1 - weak_N) * rng.random(num_tasks)], axis=1)
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"tau": 0},
        "Thompson": {"tau": 0, "do_sample": True},
        "temperature": {"tau": 0.5},
        "Thompson, each task once an epoch": {"tau": 0, "do_sample": True, "max_repeats": 1},
    }
    details = {}
    for name, args in kinds.items():
        selector = BotsSelector(features_NK, seed=0, m=GROUP_SIZE, **args)
        times = time_steps(selector, num_tasks, num_repeats=arguments.repeats)
        details[name] = {"median_ms": statistics.median(times), "max_ms": max(times)}
        print(f"{name:<34} median {statistics.median(times):6.1f} ms, slowest {max(times):6.1f} ms per step")
    slowest = max(each["median_ms"] for each in details.values())
    publish(
        name="bots_speed", unit=f"steps a second at {num_tasks} tasks", ours=1e3 / slowest, peers={}, device="cpu",
        details=details, out=arguments.out,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("speed", "simulate"), help="what to measure")
    parser.add_argument("--num-tasks", type=int, help="size of the task set; default: 1000000 (speed), 5000 (simulate)")
    parser.add_argument("--repeats", type=int, default=20, help="speed: timed steps")
    parser.add_argument("--seeds", type=int, default=5, help="simulate: number of seeds")
    parser.add_argument("--steps", type=int, default=200, help="simulate: training steps")
    parser.add_argument("--out", help="JSON file to write")
    arguments = parser.parse_args()
    {"speed": measure_speed, "simulate": simulate}[arguments.mode](arguments)


if __name__ == "__main__":
    main()
