"""Host cost of chat templates in multi-turn agents, for each way of rendering, with an instant device.

Each agent calls the model, appends the reply and a tool result, and calls again. `tokenizer` renders every prompt with
`apply_chat_template`; `compiled` renders the template that transformers compiles; `local` also leaves out the messages
that the text after a reply cannot depend on. The benchmark asserts that all three produce the same prompts.

    python -m benchmarks.engine.render_cost --model models/smollm2-135m-instruct --out results/engine/render_cost.json
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.engine.host_cost import build_engine
from benchmarks.shared.report import publish
from tunesmith.chat.messages import parse_messages, parse_tools
from tunesmith.chat.renderer import Prompt, Renderer
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.model.load import load_tokenizer
from tunesmith.rollout.service import ModelService
from tunesmith.types import Sampling

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
CONVERSATIONS = (4, 20, 100)
"""Numbers of earlier messages for which rendering alone is timed."""
NUM_DELTAS = 200
VARIANTS = ("tokenizer", "compiled", "local")


def build_renderer(tokenizer: Any, variant: str) -> Renderer:
    renderer = Renderer(tokenizer)
    jinja = renderer._template._jinja
    if variant == "tokenizer":
        jinja.is_direct = False
    if variant != "local":
        jinja.is_rendered_from_neighbors = lambda tools: False  # type: ignore[method-assign]
    return renderer


async def ask_in_turns(service: ModelService, agent: int, arguments: argparse.Namespace) -> str:
    """One agent; a digest of the prompts of its turns."""
    bound = service.open(seed=agent, order=(agent,))
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Use the tool."},
        {"role": "user", "content": f"What is {agent} times {agent}?"},
    ]
    for turn in range(arguments.turns):
        completion = await bound.model(messages, tools=[TOOL], extra_body={"ignore_eos": True})
        messages.append({"role": "assistant", "content": completion.choices[0].message.content or ""})
        messages.append({"role": "user", "content": f"result {turn} of {agent}: {agent * turn}"})
    return hashlib.sha256(repr([turn.prompt_ids for turn in bound.close()]).encode()).hexdigest()


def build_run(tokenizer: Any, variant: str, arguments: argparse.Namespace) -> Callable[[int], tuple[float, str]]:
    """A function that runs all agents and returns the CPU seconds and a digest of all prompts."""
    engine = build_engine(tokenizer, arguments.agents)
    service = ModelService(
        engine,
        build_renderer(tokenizer, variant),
        model_name="policy",
        sampling=Sampling(max_tokens=arguments.new_tokens),
    )

    async def run_all(step: int) -> list[str]:
        numbers = range(step * arguments.agents, (step + 1) * arguments.agents)
        return await asyncio.gather(*(ask_in_turns(service, number, arguments) for number in numbers))

    def run(step: int) -> tuple[float, str]:
        engine.resume(step)
        started = time.process_time()
        digests = run_lockstep(run_all(step))
        return time.process_time() - started, "".join(digests)

    return run


def measure_delta(renderer: Renderer, num_messages: int) -> float:
    """Microseconds to render and encode what follows a reply after `num_messages` messages."""
    roles = ("user", "assistant")
    history = [{"role": roles[i % 2], "content": f"message {i} with a few words"} for i in range(num_messages)]
    best = math.inf
    for repeat in range(NUM_DELTAS):
        result = {"role": "user", "content": f"result {num_messages}.{repeat}"}
        messages = parse_messages([*history, result])
        prompt = Prompt(messages=messages, tools=parse_tools([TOOL]))
        started = time.process_time()
        extended = renderer.extend(prompt, num_old=num_messages, prompt_ids=(1,), sampled_ids=(2,), is_ended=True)
        best = min(best, time.process_time() - started)
        assert extended is not None
    return best * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the tokenizer")
    parser.add_argument("--agents", type=int, default=64, help="concurrent agents")
    parser.add_argument("--turns", type=int, default=10, help="turns per agent")
    parser.add_argument("--new-tokens", type=int, default=48, help="tokens per turn")
    parser.add_argument("--repeats", type=int, default=3, help="measured repeats")
    parser.add_argument("--out", help="JSON file for the result, results/engine/NAME.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(arguments.model)
    num_calls = arguments.agents * arguments.turns
    details: dict[str, Any] = {"agents": arguments.agents, "turns": arguments.turns, "new_tokens": arguments.new_tokens}
    rates = {}
    runs = {variant: build_run(tokenizer, variant, arguments) for variant in VARIANTS}
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for step in range(arguments.repeats + 1):  # alternating, so that other load on the machine affects all variants
        results = {variant: run(step) for variant, run in runs.items()}
        assert len({digest for _, digest in results.values()}) == 1, "the variants render different prompts"
        for variant, (elapsed, _) in results.items():
            seconds[variant] += [elapsed] if step else []
    for variant in VARIANTS:
        us_per_call = statistics.median(seconds[variant]) / num_calls * 1e6
        rates[variant] = arguments.new_tokens / us_per_call * 1e6
        renderer = build_renderer(tokenizer, variant)
        deltas = {number: measure_delta(renderer, number) for number in CONVERSATIONS}
        details[variant] = {"seconds": seconds[variant], "us_per_call": us_per_call, "us_per_delta": deltas}
        shown = ", ".join(f"{number}: {us:.0f} us" for number, us in deltas.items())
        print(f"{variant:<10} {us_per_call:>5.0f} us per call, {rates[variant]:>7.0f} tokens/s; after messages {shown}")
    publish(
        name="render_cost",
        unit="tokens a second of one core",
        ours=rates["local"],
        peers={name: rates[name] for name in VARIANTS if name != "local"},
        device="cpu",
        details=details,
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
