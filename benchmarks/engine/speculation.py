"""What speculation and rollouts in flight save at the end of steps, where a few long replies are left.

A step samples groups of requests and ends with its last reply. Compared are steps without and with drafts
(`engine.max_speculating_seqs`), and steps that start further groups before the last replies are in, as with
`rollout.max_staleness` 1; the update between steps is left out, but what is in flight is computed again after it. Seeds
are fixed, so all variants sample the same replies, up to the rounding of bfloat16. Three texts: `replies` of a real
model to requests that quote code, call tools and calculate; `noise`, the same model at a temperature at which nothing
repeats; `few`, random weights over a vocabulary of eight, where most n-grams have occurred before and what followed
them says nothing, the worst case. `--costs` measures a forward that verifies drafts in decode steps, for `ForwardCost`.

    python -m benchmarks.engine.speculation --model models/qwen2.5-coder-0.5b --device cuda --costs
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import dataclasses
import json
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.engine.rollout import build_model
from benchmarks.shared.report import TimeLimit, add_time_limit, describe_settings, publish
from benchmarks.shared.shapes import SHAPES
from tunesmith.config import EngineSection
from tunesmith.engine import engine as engine_module
from tunesmith.engine.core.drafts import ForwardCost
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.model.load import load_tokenizer
from tunesmith.types import Completion, Distribution, Sampling

CODE = '''def total(items, *, tax=0.2, discount=None):
    """Price of all items with tax, after the discount."""
    subtotal = 0.0
    for item in items:
        if item["quantity"] < 0:
            raise ValueError(f"negative quantity: {item}")
        subtotal += item["price"] * item["quantity"]
    if discount is not None:
        subtotal -= subtotal * discount
    return subtotal * (1 + tax)
'''
TOOL = '{"name": "search", "parameters": {"from": "string", "to": "string", "date": "string"}}'
TASKS = (
    f"Rename the variable subtotal to amount and return the whole function:\n```python\n{CODE}```",
    f"Add a parameter `currency` that is returned with the result, and print the whole function:\n```python\n{CODE}```",
    f"Write three unit tests with pytest for this function:\n```python\n{CODE}```",
    f"""Tools: {TOOL}
Find flights from Paris to Rome on each of the first eight days of May 2025. Write one JSON call per line, such as
{{"name": "search", "arguments": {{"from": "...", "to": "...", "date": "..."}}}}.""",
    "Write a Python class `Matrix` with addition, multiplication, transpose and determinant, with docstrings.",
    """A shop sells apples at 3 dollars and pears at 4. Tom buys 7 apples and 5 pears every day for six days. List what
he pays each day and in total. Think step by step.""",
    "Explain in detail how a hash table resolves collisions, with an example in Python.",
    "Write a SQL schema with tables for customers, orders and items, and ten INSERT statements for each table.",
)
NUM_FEW = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A model, prompts and a distribution."""

    model: PreTrainedModel
    prompts: list[list[int]]
    distribution: Distribution
    eos_id: int | None


def build_text(name: str, arguments: argparse.Namespace, model: PreTrainedModel | None) -> Text:
    if name == "few":
        config = copy.deepcopy(SHAPES[arguments.shape])
        config.vocab_size = NUM_FEW
        torch.manual_seed(0)
        with torch.device(arguments.device):
            few = AutoModelForCausalLM.from_config(config, dtype=choose_dtype(arguments), attn_implementation="sdpa")
        few.eval().requires_grad_(False)
        use_plan_attention(few)
        rng = random.Random(0)
        prompts = [[rng.randrange(NUM_FEW) for _ in range(200)] for _ in TASKS]
        return Text(model=few, prompts=prompts, distribution=Distribution(), eos_id=None)
    assert model is not None
    tokenizer = load_tokenizer(arguments.model)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": task}], add_generation_prompt=True, return_dict=False
        )
        for task in TASKS
    ]
    distribution = Distribution(temperature=1.0 if name == "replies" else 3.0)
    return Text(model=model, prompts=prompts, distribution=distribution, eos_id=tokenizer.eos_token_id)


def choose_dtype(arguments: argparse.Namespace) -> torch.dtype:
    return torch.float32 if arguments.device == "cpu" else torch.bfloat16


def build_engine(text: Text, arguments: argparse.Namespace, *, max_speculating: int) -> LocalEngine:
    settings = EngineSection(
        max_num_seqs=arguments.groups * arguments.group,
        kv_cache_tokens=2 * arguments.groups * arguments.group * (arguments.max_tokens + 512),
        max_speculating_seqs=max_speculating,
    )
    return LocalEngine(text.model, None, settings, max_model_len=arguments.max_tokens + 512)


async def run_steps(engine: LocalEngine, text: Text, arguments: argparse.Namespace, *, staleness: int) -> list[Any]:
    """The replies of all groups; a step ends when as many groups as it has are finished, the oldest first."""

    async def sample_group(group: int) -> list[Completion]:
        calls = []
        for member in range(arguments.group):
            # most models end a reply; random weights do not, so its length is drawn
            drawn = int(arguments.max_tokens / 4 * random.Random(group * 1000 + member).lognormvariate(0, 0.8))
            num_tokens = arguments.max_tokens if text.eos_id is not None else max(8, min(drawn, arguments.max_tokens))
            sampling = Sampling(
                max_tokens=num_tokens, distribution=text.distribution, seed=group * 1000 + member,
                ignore_eos=text.eos_id is None,
            )  # fmt: skip
            prompt = text.prompts[group % len(text.prompts)]
            calls.append(engine.generate(prompt, sampling, order=(group, member)))
        return await asyncio.gather(*calls)

    num_groups, started = arguments.groups * arguments.steps, 0
    finished: list[list[Completion]] = []
    flying: deque[asyncio.Task[list[Completion]]] = deque()
    for step in range(arguments.steps):
        while started < min(num_groups, (step + 1 + staleness) * arguments.groups):
            flying.append(asyncio.ensure_future(sample_group(started)))
            started += 1
        needed = (step + 1) * arguments.groups - len(finished)
        while needed > 0:
            await asyncio.wait(flying, return_when=asyncio.FIRST_COMPLETED)
            done = [task for task in flying if task.done()][:needed]
            for task in done:
                flying.remove(task)
                finished.append(task.result())
            needed -= len(done)
        engine.pause()
        engine.resume(engine.policy_version + 1)
    return finished


def run_variant(engine: LocalEngine, text: Text, arguments: argparse.Namespace, *, staleness: int) -> dict[str, Any]:
    engine.pause()
    engine.resume(engine.policy_version + 1)
    engine.compute_stats()
    started, cpu_started = time.perf_counter(), time.process_time()
    groups = run_lockstep(run_steps(engine, text, arguments, staleness=staleness))
    if arguments.device != "cpu":
        torch.cuda.synchronize()
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    stats = engine.compute_stats()
    replies = [completion for group in groups for completion in group]
    lengths = sorted(len(reply.sampled_ids) for reply in replies)
    return {
        "max_staleness": staleness,
        "seconds": seconds,
        "cpu_seconds": cpu_s,
        "num_steps": stats["engine/num_steps"],
        "num_sampled": stats["engine/num_sampled_tokens"],
        "num_drafted": stats.get("engine/num_drafted_tokens", 0.0),
        "num_accepted": stats.get("engine/num_accepted_tokens", 0.0),
        "median_reply": lengths[len(lengths) // 2],
        "longest_reply": lengths[-1],
        "hash_of_replies": hash(tuple(reply.sampled_ids for reply in replies)),
    }


def measure_costs(text: Text, arguments: argparse.Namespace, limit: TimeLimit) -> list[dict[str, float]]:
    """Seconds of a decode step and of a step that verifies drafts of 15 tokens, all of them right.

    A reply is sampled again with the same seed, so the first one is its draft.
    """
    figures: list[dict[str, float]] = []
    known = ("CPU_COST", "CUDA_COST")
    clock = time.process_time if arguments.device == "cpu" else time.perf_counter
    saved = {name: getattr(engine_module, name) for name in known}
    for name in known:
        setattr(engine_module, name, ForwardCost(step=0.0, row=0.0, context=0.0))
    try:
        for num_requests, context in arguments.cost_points:
            if not limit.has_room(f"the cost of {num_requests} x {context}"):
                break
            settings = EngineSection(
                max_num_seqs=num_requests, kv_cache_tokens=(num_requests + 1) * (context + 512),
                max_speculating_seqs=num_requests,
            )  # fmt: skip
            engines = [
                LocalEngine(text.model, None, each, max_model_len=context + 512)
                for each in (settings.model_copy(update={"max_speculating_seqs": 0}), settings)
            ]
            rng = random.Random(0)
            vocab_size = text.model.config.vocab_size
            prompts = [[rng.randrange(vocab_size) for _ in range(context)] for _ in range(num_requests)]
            # without drafts, with drafts, which captures their graphs, and measured
            plain, verified = (
                [time_replies(engine, prompts, arguments.cost_tokens, clock) for _ in range(3)][-1]
                for engine in engines
            )
            step_s, verify_s = plain.seconds / plain.num_tokens, verified.seconds / verified.num_steps
            figures.append(
                {
                    "num_requests": num_requests,
                    "context": context,
                    "step_s": step_s,
                    "verify_s": verify_s,
                    "tokens_per_verify": verified.num_tokens / verified.num_steps,
                    "cost": verify_s / step_s,
                }
            )
            print(json.dumps(figures[-1]), flush=True)
    finally:
        for name, cost in saved.items():
            setattr(engine_module, name, cost)
    return figures


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What was sampled from the moment on when every reply had a token."""

    seconds: float
    num_steps: int
    num_tokens: int
    """Of one reply."""


def time_replies(
    engine: LocalEngine, prompts: Sequence[Sequence[int]], num_tokens: int, clock: Callable[[], float]
) -> Timed:
    counts, num_before, started = [0] * len(prompts), 0, clock()

    async def sample(index: int, prompt: Sequence[int]) -> None:
        def note(ids: Sequence[int], logprobs: Sequence[float]) -> None:
            nonlocal started, num_before
            counts[index] += len(ids)
            if not num_before and all(counts):
                started, num_before = clock(), max(counts)
                engine.compute_stats()

        sampling = Sampling(max_tokens=num_tokens, seed=index, ignore_eos=True)
        await engine.generate(prompt, sampling, order=(index,), on_tokens=note)

    async def run() -> None:
        await asyncio.gather(*(sample(index, prompt) for index, prompt in enumerate(prompts)))

    run_lockstep(run())
    num_steps = max(int(engine.compute_stats()["engine/num_steps"]), 1)
    return Timed(seconds=clock() - started, num_steps=num_steps, num_tokens=num_tokens - num_before)


def parse_point(text: str) -> tuple[int, int]:
    num_requests, _, context = text.partition("x")
    return int(num_requests), int(context)


def main(options: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of the model of `replies` and `noise`")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b", help="shape of the model of `few`")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--texts", nargs="*", choices=["replies", "noise", "few"], default=["replies", "noise", "few"])
    parser.add_argument("--groups", type=int, default=8, help="groups of a step")
    parser.add_argument("--group", type=int, default=8, help="requests of a group")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=1024, help="longest reply")
    parser.add_argument("--speculating", type=int, nargs="+", default=[0, 8, 16], help="engine.max_speculating_seqs")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1], help="rollout.max_staleness")
    parser.add_argument("--costs", action="store_true", help="measure what a verifying forward costs")
    parser.add_argument(
        "--cost-points", type=parse_point, nargs="+", default=[(1, 256), (8, 256), (1, 4096), (8, 4096)]
    )
    parser.add_argument("--cost-tokens", type=int, default=256)
    add_time_limit(parser)
    parser.add_argument("--out", help="JSON file for the result, results/engine/NAME.json")
    arguments = parser.parse_args(options)
    limit = TimeLimit(arguments.limit_s)
    if arguments.model is None and {"replies", "noise"} & set(arguments.texts):
        parser.error("replies and noise need --model")
    model = None if arguments.model is None else build_model(arguments)
    figures: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.texts}
    costs: list[dict[str, float]] = []
    if arguments.costs:  # first, since a verifying forward must pay before drafts can
        costs = measure_costs(build_text((arguments.texts or ["few"])[0], arguments, model), arguments, limit)
        report(arguments, figures, costs)
    for name in arguments.texts:
        text = build_text(name, arguments, model)
        for max_speculating in arguments.speculating:
            if not limit.has_room(f"{name}, {max_speculating}"):
                continue
            engine = build_engine(text, arguments, max_speculating=max_speculating)
            if arguments.device != "cpu":  # captures graphs and compiles kernels
                run_variant(engine, text, arguments, staleness=arguments.staleness[0])
            for staleness in arguments.staleness:
                if not limit.has_room(f"{name}, {max_speculating}, staleness {staleness}"):
                    continue
                figure = run_variant(engine, text, arguments, staleness=staleness)
                figures[name].append({"max_speculating_seqs": max_speculating} | figure)
                print(
                    f"{name:<8} drafts {max_speculating:>3} staleness {figure['max_staleness']}"
                    f"{figure['seconds']:>8.2f} s{figure['cpu_seconds']:>8.2f} CPU s{figure['num_steps']:>8.0f} steps"
                    f"{figure['num_sampled']:>9.0f} tokens{figure['num_drafted']:>8.0f} drafted"
                    f"{figure['num_accepted']:>8.0f} accepted",
                    flush=True,
                )
            report(arguments, figures, costs)


def report(arguments: argparse.Namespace, figures: dict[str, list[dict[str, Any]]], costs: list[Any]) -> None:
    """Print and write the results so far."""
    first = next((found for found in figures.values() if found), [])
    fastest = min((figure["seconds"] for figure in first), default=float("inf"))
    publish(
        name="speculation",
        unit="steps of the first text in its fastest variant, a second",
        ours=arguments.steps / fastest,
        peers={},
        device=arguments.device,
        details={"settings": describe_settings(arguments, hidden=["model", "out"]), "figures": figures, "costs": costs},
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
