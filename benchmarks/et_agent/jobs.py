"""The jobs of et_agent.py: parts of recipes/et_agent/pocket.yaml that run as pipelines of their own.

A job has some stages of the recipe, changed for its arm. What its settings refer to in stages of other jobs becomes a
path, which is known once those jobs are done, so a job is built when it starts.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tunesmith.commands.run.config import STAGE
from tunesmith.runs.load_config import map_strings

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "et_agent" / "pocket.yaml"
RANDOM = f"{Path(__file__).parent / 'random_questions.py'}:select"
LAST_SHARED = "prompted"
FLYWHEEL, PLAIN = ("flywheel", "rft_filter"), ("rollouts", "rollouts_filter")
CURRICULUM, SELECTIONS = "curriculum", "selection"
EVALUATION = "_evaluation"
"""End of the names of jobs that only evaluate."""
Stages = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A variant of the curriculum; None and the default leave what the recipe has."""

    start: str = "rft"
    """Stage whose model round 1 starts from."""
    sigma: float | None = None
    """The same sigma in all rounds, without decay inside them."""
    is_random: bool = False
    """Random questions instead of Pareto sampling."""
    has_total_budget: bool = False
    """Further steps for the rollouts that Pareto sampling needs and random questions do not."""


ARMS: Mapping[str, Arm] = {
    "rl": Arm(),
    "rl_correctness": Arm(sigma=0.0),
    "rl_random": Arm(is_random=True),
    "rl_sigma_0.2": Arm(sigma=0.2),
    "rl_sigma_3": Arm(sigma=3.0),
    "rl_from_prompted": Arm(start="prompted"),
    "rl_random_longer": Arm(is_random=True, has_total_budget=True),
}
"""All make the same number of rollouts in reinforcement learning, except the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A pipeline that runs in its own process."""

    name: str
    needs: tuple[str, ...] = ()
    build: Callable[[], dict[str, Any]] = field(repr=False)
    """The content of its pipeline file; called once the jobs that it needs are done."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The jobs of one seed, under `folder`."""

    folder: Path
    seed: int
    arms: Sequence[str]
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key of the recipe -> value."""
    num_samples: int = 4

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe with this seed and the overrides."""
        recipe: dict[str, Any] = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
        recipe["variables"]["seed"] = self.seed
        recipe["stages"]["eval"]["evaluation"]["num_samples"] = self.num_samples
        for key, value in self.overrides.items():
            place = recipe
            *parents, last = key.split(".")
            for parent in parents:
                place = place[parent]
            place[last] = value
        return recipe

    def list_jobs(self) -> list[Job]:
        """All jobs; where processes are few, those first that others wait for and that more orderings are about."""
        shared = list(self.recipe["stages"])
        shared = shared[: shared.index(LAST_SHARED) + 1]
        jobs = [
            self.make("shared", shared),
            self.make("flywheel", FLYWHEEL, needs=["shared"]),
            self.make("rft", ["rft"], needs=["flywheel"]),
        ]
        arms = []
        for name in self.arms:
            needs = ["shared"] if ARMS[name].start == "prompted" else ["rft"]
            arms.append(self.make(name, [CURRICULUM], needs=needs, evaluates=CURRICULUM, arm=ARMS[name]))
        plain = self.make("rft_rollouts", [*PLAIN, "rft_rollouts"], needs=["flywheel"], evaluates="rft_rollouts")
        evaluations = [
            self.make(f"{name}{EVALUATION}", [], needs=[job], evaluates=name)
            for name, job in (("prompted", "shared"), ("rft", "rft"))
        ]
        return [*jobs, *arms[:1], plain, *evaluations, *arms[1:]]

    def make(
        self,
        name: str,
        stages: Sequence[str],
        *,
        needs: Sequence[str] = (),
        evaluates: str = "",
        arm: Arm | None = None,
    ) -> Job:
        def build() -> dict[str, Any]:
            recipe = self.recipe
            chosen = {each: recipe["stages"][each] for each in stages}
            if arm is not None:
                chosen = build_arm(recipe, arm, num_questions=self.count_questions)
            if "rollouts" in chosen:
                num_rollouts = self.match_tokens(recipe)
                chosen["rollouts"] |= {"num_rollouts": num_rollouts, "max_per_question": num_rollouts}
            if evaluates:
                chosen["eval"] = {
                    **recipe["stages"]["eval"],
                    "models": {name.removesuffix(EVALUATION): f"{STAGE}{evaluates}"},
                }
            rest = {"variables": recipe["variables"], "stages": chosen}
            return {"folder": str(self.job_folder(name)), **map_strings(rest, lambda text: self.resolve(text, chosen))}

        return Job(
            name=f"seed{self.seed}/{name}", needs=tuple(f"seed{self.seed}/{each}" for each in needs), build=build
        )

    def job_folder(self, name: str) -> Path:
        return self.folder / f"seed{self.seed}" / name

    def find_stage(self, stage: str) -> Path:
        """Folder of the job that has a stage of the recipe."""
        job = "flywheel" if stage in FLYWHEEL else "rft_rollouts" if stage in (*PLAIN, "rft_rollouts") else stage
        return self.job_folder(job if job in ("flywheel", "rft_rollouts", "rft") else "shared")

    def resolve(self, text: str, own: Mapping[str, Any]) -> str:
        """A reference to a stage of another job as a path; other texts as they are."""
        stage, _, file = text.removeprefix(STAGE).partition("/")
        inner = own.get(CURRICULUM, {}).get("stages", {})
        if not text.startswith(STAGE) or stage in own or stage in inner or stage == "previous":
            return text
        folder = self.find_stage(stage)
        if file:
            return str(folder / stage / file)
        return str(folder / read_done(folder, stage)["model"])

    def count_questions(self) -> int:
        """Training questions, whose pass rates are measured in each round."""
        path = self.job_folder("shared") / "questions" / "train.jsonl"
        return len(path.read_text(encoding="utf-8").splitlines())

    def match_tokens(self, recipe: Mapping[str, Any]) -> int:
        """Rollouts of each question that sample at least as many tokens as the flywheel did."""
        folder = self.job_folder("flywheel")
        lines = (folder / "flywheel" / "attempts.jsonl").read_text(encoding="utf-8").splitlines()
        first = [row["tokens"] for row in map(json.loads, lines) if row.get("iteration") == 0]
        per_rollout = sum(first) / recipe["stages"]["flywheel"]["num_rollouts"]
        return math.ceil(read_done(folder, "flywheel")["tokens"] / per_rollout)


def read_done(folder: Path, stage: str) -> dict[str, Any]:
    """The record of a complete stage."""
    record: dict[str, Any] = json.loads((folder / "stages" / stage / "DONE.json").read_text(encoding="utf-8"))
    return record


def build_arm(recipe: Mapping[str, Any], arm: Arm, *, num_questions: Callable[[], int]) -> Stages:
    """The curriculum of an arm; `num_questions` counts the training questions."""
    rounds = copy.deepcopy(recipe["stages"][CURRICULUM])
    stages, rl = rounds["stages"], rounds["stages"]["rl"]
    rounds["start"] = f"{STAGE}{arm.start}"
    if arm.sigma is not None:
        rounds["values"]["sigma"] = [arm.sigma] * rounds["count"]
        for operator in rl["experience"]["operators"]:
            operator["args"]["decay"] = "none"
    if arm.is_random:
        questions = stages["pass_rate"]["train_dataset"]["path"]
        rl["train_dataset"] = {"path": f"{STAGE}{SELECTIONS}/train.jsonl"}
        rounds["stages"] = {
            SELECTIONS: {
                "kind": "function",
                "function": RANDOM,
                "args": {
                    "data": questions,
                    "num_selected": stages["pareto"]["num_selected"],
                    "seed": recipe["variables"]["seed"],
                    "curriculum_round": "round:number",
                },
            },
            "rl": {"kind": "rl", **rl},
        }
        if arm.has_total_budget:
            rl = rounds["stages"]["rl"]
            per_step = rl["algorithm"]["batch_size"] * rl["algorithm"]["group_size"]
            measured = num_questions() * stages["pass_rate"]["num_runs"]
            rl["total_steps"] += round(measured / per_step)
            rl["save_interval_steps"] = rl["total_steps"]
    return {CURRICULUM: rounds}
