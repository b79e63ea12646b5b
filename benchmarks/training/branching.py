"""Training on the trees of branching rollouts, with and without prefix sharing: tokens computed, seconds of the update.

The groups come from the code that runs branching rollouts, with random tokens: a prompt, then turns with tool
results between them. Rows of the table: all rollouts from the task (GRPO), half of them (ARPO's default), a quarter.
With prefix sharing off every rollout is a row of its own tokens. Logprobs are random, so only times and counts matter.

    python -m benchmarks.training.branching --out results/training/branching/update_cpu_pocket.json
    python -m benchmarks.training.branching --device cuda --shape qwen2.5-1.5b \\
        --out results/training/branching/update_cuda_1.5b.json
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import random
import statistics
import time

import torch
from transformers import PreTrainedModel

from benchmarks.shared.report import publish
from benchmarks.shared.shapes import SHAPES, build_random_model
from tunesmith.config import AlgorithmSection, BranchingSection, TrainerSection
from tunesmith.experience.samples import build_samples
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer
from tunesmith.rollout.branching.tree import Branching, GroupTrees
from tunesmith.rollout.recording.replay import RolloutRecord
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import Completion, Group, Sample, Sampling, Task, Trajectory, Turn


async def run_random(
    task: Task, run_index: int, record: RolloutRecord, *, lengths: argparse.Namespace, vocab_size: int
) -> Trajectory:
    """A rollout that samples random tokens; a branch receives its parent's turns."""
    own, shared = random.Random(f"{task.task_id}/{run_index}"), random.Random(task.task_id)
    prompt = tuple(shared.randrange(vocab_size) for _ in range(lengths.prompt_tokens))
    sampling = Sampling(max_tokens=lengths.turn_tokens)
    turns: list[Turn] = []
    for number in range(lengths.num_turns):
        if turns:
            query = random.Random(str(turns[-1].sampled_ids))
            result = tuple(query.randrange(vocab_size) for _ in range(lengths.result_tokens))
            prompt = turns[-1].prompt_ids + turns[-1].sampled_ids + result
        recorded = record.start((number, 0), prompt, sampling)
        turn = None if recorded is None else recorded.turn
        if turn is None:
            count = own.randint(lengths.turn_tokens // 2, lengths.turn_tokens)
            turn = Turn(
                prompt_ids=prompt,
                sampled_ids=tuple(own.randrange(vocab_size) for _ in range(count)),
                logprobs=(-10.0,) * count,
                policy_versions=(0,) * count,
                distribution=sampling.distribution,
                stop_reason="eos",
                entropies=(1.0,) * count,
            )
            completion = Completion(
                sampled_ids=turn.sampled_ids,
                logprobs=turn.logprobs,
                policy_versions=turn.policy_versions,
                stop_reason="eos",
            )
            record.finish((number, 0), turn, completion)
        turns.append(turn)
        await asyncio.sleep(0)
    point = record.point
    return Trajectory(
        task=task,
        run_index=run_index,
        turns=tuple(turns),
        reward=own.random(),
        parent=None if point is None else point.parent,
        branch_at=None if point is None else point.branch_at,
        turn_owners=() if point is None else point.turn_owners,
    )


async def run_group(task: Task, arguments: argparse.Namespace, *, num_initial: int, vocab_size: int) -> Group:
    section = BranchingSection(initial_rollouts=num_initial, entropy_weight=0.0, base_probability=0.5)
    branching, ended = Branching(section=section, vocab_size=vocab_size), dict[int, Trajectory]()

    async def run(run_index: int, record: RolloutRecord) -> None:
        ended[run_index] = await run_random(task, run_index, record, lengths=arguments, vocab_size=vocab_size)

    await GroupTrees(branching, group_size=arguments.group_size, seed=task.index, run=run).run()
    return Group(task=task, trajectories=tuple(ended[index] for index in range(arguments.group_size)))


def build_batch(arguments: argparse.Namespace, *, num_initial: int, vocab_size: int) -> list[Sample]:
    """The samples of all groups, with random advantages."""
    tasks = [Task(task_id=f"t/{index}", index=index, row={}) for index in range(arguments.num_groups)]
    groups = [asyncio.run(run_group(task, arguments, num_initial=num_initial, vocab_size=vocab_size)) for task in tasks]
    rng = random.Random(0)
    return build_samples(groups, [[rng.gauss(0, 1) for _ in group.trajectories] for group in groups])[0]


def measure_update(
    model: PreTrainedModel, samples: list[Sample], arguments: argparse.Namespace, *, has_sharing: bool
) -> dict[str, float]:
    """Median seconds of an update after one for warm-up, and the tokens that it computes."""
    settings = TrainerSection(learning_rate=1e-6, has_prefix_sharing=has_sharing, mismatch_warn=1e9, mismatch_stop=1e9)
    trainer = Trainer(
        copy.deepcopy(model), settings, AlgorithmSection(), max_model_len=4096, num_total_steps=arguments.repeats + 1
    )
    is_cuda = arguments.device != "cpu"
    seconds, cpu_seconds, metrics = [], [], {}
    for _ in range(arguments.repeats + 1):
        started, cpu_started = time.perf_counter(), time.process_time()
        metrics = trainer.step(samples)
        if is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - cpu_started)
    return {
        "seconds": statistics.median(seconds[1:]),
        "seconds_min": min(seconds[1:]),
        "seconds_max": max(seconds[1:]),
        "cpu_seconds": statistics.median(cpu_seconds[1:]),
        "tokens_computed": float(metrics["train/num_tokens"]),
        "tokens_of_rollouts": float(metrics["train/num_flat_tokens"]),
        "trained_tokens": float(metrics["train/num_trained_tokens"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=["pocket", *SHAPES], default="pocket", help="random weights of this shape")
    parser.add_argument("--num-groups", type=int, default=4, help="groups of an update")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--num-turns", type=int, default=4, help="model calls of a rollout; one more than tool calls")
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--turn-tokens", type=int, default=60, help="longest turn")
    parser.add_argument("--result-tokens", type=int, default=100, help="tokens of a tool result")
    parser.add_argument("--repeats", type=int, default=5, help="measured repeats")
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    torch.set_num_threads(torch.get_num_threads() if arguments.device == "cpu" else 1)
    if arguments.shape == "pocket":
        model: PreTrainedModel = build_pocket_model(build_pocket_tokenizer()).to(arguments.device)
    else:
        dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
        model = build_random_model(arguments.shape, dtype=dtype, device=torch.device(arguments.device))
    use_plan_attention(model)
    vocab_size, size = model.config.vocab_size, arguments.group_size
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name, num_initial in {"grpo": size, "arpo_half": size // 2, "arpo_quarter": size // 4}.items():
        samples = build_batch(arguments, num_initial=num_initial, vocab_size=vocab_size)
        results[name] = {
            label: measure_update(model, samples, arguments, has_sharing=has_sharing)
            for label, has_sharing in (("shared", True), ("flat", False))
        }
    print(f"{'rollouts':14}{'sharing':>9}{'tokens computed':>17}{'of':>9}{'seconds':>9}{'min':>8}{'max':>8}{'cpu':>8}")
    for name, row in results.items():
        for label, each in row.items():
            print(
                f"{name:14}{label:>9}{each['tokens_computed']:>17.0f}{each['tokens_of_rollouts']:>9.0f}"
                f"{each['seconds']:>9.3f}{each['seconds_min']:>8.3f}{each['seconds_max']:>8.3f}{each['cpu_seconds']:>8.3f}"
            )
    half = results["arpo_half"]
    publish(
        name=f"branching_update_{arguments.shape}",
        unit="updates a second on ARPO's trees",
        ours=1 / half["shared"]["seconds"],
        peers={"without prefix sharing": 1 / half["flat"]["seconds"]},
        device=arguments.device,
        details={"results": results, "arguments": vars(arguments)},
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
