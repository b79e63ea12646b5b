"""Exact numerics on a CUDA device: equal bits in sampler and trainer, over turns, forks and tries.

The mode belongs to a process, so each case runs this file in one of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from killed_runs import read_metrics
from tunesmith.experience.store import load_rollouts
from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer

pytestmark = pytest.mark.gpu
NUM_PROMPTS, GROUP = 6, 4


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "mistral", "gemma3"])
def test_sampler_and_trainer_compute_equal_bits(name):
    with ThreadPoolExecutor() as pool:  # most of the time is the host's, which traces and compiles
        fast, exact = pool.map(run_child, (name, name), ("fast", "exact"))
    found = {"fast": fast, "exact": exact}
    assert found["exact"]["tokens"] > 1500
    assert found["exact"]["max_log_ratio"] == 0 and found["exact"]["kl"] == 0
    assert found["fast"]["max_log_ratio"] > 1e-3
    assert found["exact"]["turns"] == found["exact"]["alone"]
    # of other tokens once a draw differs; tests/trainer/layers/test_exact_layers.py compares gradients of the same
    assert found["exact"]["grad_norm"] == pytest.approx(found["fast"]["grad_norm"], rel=0.15)


NUM_STEPS, JUDGED_A_STEP = 4, 8
AGENT = textwrap.dedent(
    """
    import os
    import signal
    from tunesmith import JudgeOutput, WorkflowOutput

    judged = []

    async def workflow(task, model):
        messages = [{"role": "user", "content": task["question"]}]
        for _ in range(2):
            text = (await model(messages)).choices[0].message.content
            result = {"role": "user", "content": f"There are {len(text)} letters."}
            messages += [{"role": "assistant", "content": text}, result]
        return WorkflowOutput(response=text)

    async def judge(task, response):
        judged.append(response)
        if len(judged) == int(os.environ["KILLED_AT"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return JudgeOutput(reward=float(len(response) % 5))
    """
)
SETTINGS = {
    "workflow": "agent.py:workflow",
    "judge": "agent.py:judge",
    "checkpoint_root_dir": "runs",
    "total_steps": NUM_STEPS,
    "save_interval_steps": 2,
    "model": {
        "path": "pocket", "dtype": "bfloat16", "numerics": "exact",
        "max_model_len": 256, "max_tokens": 24, "device": "cuda",
    },
    "train_dataset": {"path": "data"},
    "algorithm": {"batch_size": 2, "group_size": JUDGED_A_STEP // 2},
    "engine": {"kv_cache_tokens": 8192, "max_num_seqs": 8},
    "rollout": {"chat_model": "openai"},
    "trainer": {"learning_rate": 1e-3},
}  # fmt: skip


def tune(folder: Path, name: str, *, killed_at: int = 0) -> None:
    environment = os.environ | {
        "KILLED_AT": str(killed_at),
        "PYTHONPATH": f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tunesmith", "tune", "run.yaml", "--resume", "--set", f"name={name}"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == (-signal.SIGKILL if killed_at else 0), done.stderr[-3000:]


def test_a_second_run_that_is_killed_and_resumed_gives_the_same_bits(tmp_path):
    """Weights, rollouts with their logprobs, and all metrics but times."""
    tokenizer = build_pocket_tokenizer()
    tokenizer.save_pretrained(tmp_path / "pocket")
    build_pocket_model(tokenizer, num_layers=2).save_pretrained(tmp_path / "pocket")
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "data").mkdir()
    questions = [f"Tom has {n} apples and buys {n + 3} more. How many apples does Tom have now?" for n in range(12)]
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps({"question": q}) + "\n" for q in questions))
    (tmp_path / "run.yaml").write_text(json.dumps(SETTINGS))
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(tune, tmp_path, "whole")]
        runs.append(pool.submit(tune, tmp_path, "killed", killed_at=2 * JUDGED_A_STEP + 3))
        for run in runs:
            run.result()
    tune(tmp_path, "killed")
    whole, killed = (tmp_path / "runs/tunesmith" / name for name in ("whole", "killed"))
    metrics, weights = read_metrics(whole), load_file(whole / f"global_step_{NUM_STEPS}/model.safetensors")
    first = load_file(whole / "global_step_2/model.safetensors")
    assert all(row["mismatch/max_log_ratio"] == 0 for row in metrics if "mismatch/max_log_ratio" in row)
    assert any((first[name] != weights[name]).any() for name in weights)
    assert read_metrics(killed) == metrics
    found = load_file(killed / f"global_step_{NUM_STEPS}/model.safetensors")
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    for step in range(1, NUM_STEPS + 1):
        one, same = (load_rollouts(each / f"rollouts/step_{step:06d}.parquet") for each in (whole, killed))
        assert [[each.turns for each in group.trajectories] for group in one] == [
            [each.turns for each in group.trajectories] for group in same
        ]


def run_child(name: str, numerics: str) -> dict[str, float]:
    command = [sys.executable, __file__, name, numerics]
    folders = [str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])]
    path = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def main(name: str, numerics: str) -> None:
    from transformers import AutoModelForCausalLM

    from tiny_models import CONFIGS
    from tunesmith.config import AlgorithmSection, EngineSection, TrainerSection
    from tunesmith.engine.engine import LocalEngine
    from tunesmith.model.forward.attention import use_plan_attention
    from tunesmith.model.forward.exact import use_exact_numerics
    from tunesmith.trainer.trainer import Trainer
    from tunesmith.types import Distribution, DistributionSpan, Sample, Sampling

    if numerics == "exact":
        use_exact_numerics()
    config = CONFIGS[name]
    for key, value in {"hidden_size": 512, "intermediate_size": 1408, "vocab_size": 4096, "head_dim": 64}.items():
        setattr(config, key, value)
    config.num_attention_heads, config.num_key_value_heads, config.max_position_embeddings = 8, 2, 2048
    if getattr(config, "sliding_window", None):
        config.sliding_window = 70
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16).eval().cuda()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
    use_plan_attention(model)
    engine = LocalEngine(model, None, EngineSection(kv_cache_tokens=65536, max_num_seqs=32), max_model_len=1024)
    engine.pause()
    engine.resume(0)
    rng = random.Random(0)

    async def play(prompt: list[int], index: int) -> list[tuple[list[int], list[int], list[float]]]:
        """Two turns: a reply, tokens of a tool, a reply."""
        turns, ids = [], prompt
        for turn, length in enumerate((40 + 7 * index % 23, 30)):
            sampling = Sampling(max_tokens=length, seed=100 * index + turn, ignore_eos=True)
            reply = await engine.generate(ids, sampling, order=(index, turn))
            turns.append((ids, list(reply.sampled_ids), list(reply.logprobs)))
            ids = ids + turns[-1][1] + results[index]
        return turns

    prompts = [[rng.randrange(4096) for _ in range(length)] for length in (5, 63, 64, 65, 130, 200)]
    results = [[rng.randrange(4096) for _ in range(rng.randrange(1, 90))] for _ in range(NUM_PROMPTS * GROUP)]

    async def play_all() -> list:
        return await asyncio.gather(*[play(prompts[index // GROUP], index) for index in range(NUM_PROMPTS * GROUP)])

    async def play_alone() -> list:
        return await play(prompts[1], GROUP)

    played = asyncio.run(play_all())
    engine.pause()
    engine.resume(1)
    alone = asyncio.run(play_alone())
    samples = []
    for index, turns in enumerate(played):
        ids, mask, logprobs = list(turns[0][0]), [False] * len(turns[0][0]), [0.0] * len(turns[0][0])
        for prompt, reply, found in turns:
            extra = len(prompt) - len(ids)
            ids += [*prompt[len(ids) :], *reply]
            mask += [False] * extra + [True] * len(reply)
            logprobs += [0.0] * extra + found
        spans = [each for each in range(len(mask)) if mask[each] and not mask[each - 1]]
        stops = [each + 1 for each in range(len(mask)) if mask[each] and (each + 1 == len(mask) or not mask[each + 1])]
        samples.append(
            Sample(
                token_ids=tuple(ids), is_sampled=tuple(mask), logprobs=tuple(logprobs),
                advantages=tuple((1.0 if index % 2 else -1.0) if each else 0.0 for each in mask),
                policy_versions=tuple(0 if each else None for each in mask),
                distribution_spans=tuple(
                    DistributionSpan(start=start, end=stop, distribution=Distribution())
                    for start, stop in zip(spans, stops, strict=True)
                ),
                group_index=index // GROUP, trajectory_index=index,
            )
        )  # fmt: skip
    settings = TrainerSection(learning_rate=1e-12, mismatch_warn=1e9, mismatch_stop=1e9, max_tokens_per_row=1024)
    trainer = Trainer(model, settings, AlgorithmSection(), max_model_len=1024, num_total_steps=1)
    metrics = trainer.step(samples)
    print(
        json.dumps(
            {
                "kl": metrics["mismatch/kl"], "max_log_ratio": metrics["mismatch/max_log_ratio"],
                "grad_norm": metrics["train/grad_norm"], "tokens": sum(sum(each.is_sampled) for each in samples),
                "turns": [turn[1:] for turn in played[GROUP]], "alone": [turn[1:] for turn in alone],
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
