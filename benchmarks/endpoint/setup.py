"""The endpoint over an engine, and agents that call it in process, without a client and over HTTP."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from transformers import PreTrainedTokenizerBase

from benchmarks.endpoint.load import GROUP_SIZE, Measured, build_question, draw_length, run_load
from tunesmith.chat.renderer import Renderer
from tunesmith.config import ModelSection, RolloutSection
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.rollout.chat_model import ChatModel
from tunesmith.rollout.service import BoundModel, ModelService
from tunesmith.types import Completion, OnTokens, Sampling

LATENCY_TOKENS = 16
"""Tokens a call where latency is measured."""
MODEL = "policy"
Prompts = list[list[tuple[int, ...]]]
"""For each agent the prompt ids of its calls."""


class InstantEngine:
    """Implements `tunesmith.types.Engine`: every completion is the same text, at once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._text_ids = tokenizer.encode(" ".join(build_question(agent, 0) for agent in range(0, 80, GROUP_SIZE)))
        self.eos_ids = frozenset({tokenizer.eos_token_id})
        self.max_model_len = 10**6
        self.policy_version = 0

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        order: tuple[int, ...] = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        await asyncio.sleep(0)
        ids = tuple(self._text_ids[: sampling.max_tokens])
        logprobs = (-1.0,) * len(ids)
        if on_tokens is not None:
            on_tokens(ids, logprobs)
        return Completion(
            sampled_ids=ids, logprobs=logprobs, policy_versions=(self.policy_version,) * len(ids), stop_reason="length"
        )

    def pause(self) -> None:
        pass

    def resume(self, policy_version: int) -> None:
        self.policy_version = policy_version

    def compute_stats(self) -> dict[str, float]:
        return {}


class Setup:
    """An engine behind the endpoint, and the agents that call it."""

    def __init__(self, engine: Any, tokenizer: PreTrainedTokenizerBase, *, model: str) -> None:
        section = ModelSection(path=model)
        renderer = Renderer(
            tokenizer,
            tool_call_parser=section.tool_call_parser,
            reasoning_parser=section.reasoning_parser,
            enable_thinking=section.enable_thinking,
        )
        self._engine = engine
        self._service = ModelService(
            engine, renderer, model_name=MODEL, sampling=Sampling(max_tokens=LATENCY_TOKENS), build_model=ChatModel
        )
        self.prompts: Prompts = []
        """Those of the last agents in process."""
        self.ways: dict[str, Callable[..., Awaitable[Measured]]] = {
            "in process": self.run_in_process, "no client": self.run_without_client, "http": self.run_over_http,
        }  # fmt: skip

    def run(self, work: Callable[..., Awaitable[Measured]], *arguments: int, **shape: int) -> Measured:
        """Run agents with an empty KV cache."""
        self._engine.pause()
        self._engine.resume(self._engine.policy_version + 1)
        gc.collect()

        async def measure() -> Measured:
            started = time.process_time()
            measured = await work(*arguments, **shape)
            return replace(measured, cpu_s=time.process_time() - started)

        return run_lockstep(measure(), RolloutSection(max_concurrency=512))

    def compute_engine_stats(self) -> dict[str, float]:
        """Metrics of the engine since the last call."""
        return self._engine.compute_stats()

    def _open(self, num_agents: int) -> list[BoundModel]:
        return [self._service.open(seed=index, order=(index,)) for index in range(num_agents)]

    async def run_in_process(self, num_agents: int, **shape: Any) -> Measured:
        """Agents that call `model.client`."""

        async def call(client: Any, fields: dict[str, Any]) -> str:
            extra = {"ignore_eos": fields.pop("ignore_eos")}
            reply = await client.chat.completions.create(**fields, extra_body=extra)
            return reply.choices[0].message.content

        return await self._run_agents(call, num_agents, **shape)

    async def run_without_client(self, num_agents: int, **shape: Any) -> Measured:
        """Agents that give the endpoint JSON values and receive JSON values."""

        async def call(client: Any, fields: dict[str, Any]) -> str:
            reply = await self._service.endpoint.complete(client.api_key, fields)
            return reply["choices"][0]["message"]["content"]

        return await self._run_agents(call, num_agents, **shape)

    async def _run_agents(
        self,
        call_model: Callable[[Any, dict[str, Any]], Awaitable[str]],
        num_agents: int,
        *,
        num_calls: int,
        num_tokens: int,
        is_growing: bool,
    ) -> Measured:
        latencies: list[float] = []
        bound = self._open(num_agents)

        async def act(index: int, client: Any) -> None:
            messages: list[dict[str, str]] = []
            for call in range(num_calls):
                messages.append({"role": "user", "content": build_question(index, call)})
                length = draw_length(index, call, num_tokens, is_growing=is_growing)
                started = time.perf_counter()
                fields = {"model": MODEL, "messages": messages, "max_tokens": length, "ignore_eos": True}
                text = await call_model(client, fields)
                latencies.append(time.perf_counter() - started)
                messages.append({"role": "assistant", "content": text})
                if not is_growing:
                    messages.clear()

        started = time.perf_counter()
        await asyncio.gather(*(act(index, each.model.client) for index, each in enumerate(bound)))
        seconds = time.perf_counter() - started
        turns = [each.close() for each in bound]
        self.prompts = [[turn.prompt_ids for turn in each] for each in turns]
        num_sampled = sum(len(turn.sampled_ids) for each in turns for turn in each)
        return Measured(latencies_s=latencies, num_tokens=num_sampled, seconds=seconds)

    async def run_over_http(self, num_agents: int, *, num_calls: int, num_tokens: int, is_growing: bool) -> Measured:
        """Agents in other processes."""
        async with self._service.serve() as url:
            bound = self._open(num_agents)
            keys = [each.model.api_key for each in bound]
            fields = {"ignore_eos": True}
            port = urlsplit(url).port
            assert port is not None
            measured = await run_load(
                port, keys, model=MODEL, num_calls=num_calls, num_tokens=num_tokens, is_growing=is_growing,
                fields=fields,
            )  # fmt: skip
            for each in bound:
                each.close()
        return measured

    async def run_direct(self, *, num_tokens: int, is_growing: bool) -> Measured:
        """The calls of the last agents in process, given to the engine as token ids."""
        latencies: list[float] = []
        num_sampled = 0

        async def act(index: int, prompts: list[tuple[int, ...]]) -> None:
            nonlocal num_sampled
            for call, prompt_ids in enumerate(prompts):
                length = draw_length(index, call, num_tokens, is_growing=is_growing)
                sampling = Sampling(max_tokens=length, ignore_eos=True, seed=1000 * index + call)
                started = time.perf_counter()
                completion = await self._engine.generate(prompt_ids, sampling, order=(index, call))
                latencies.append(time.perf_counter() - started)
                num_sampled += len(completion.sampled_ids)

        started = time.perf_counter()
        await asyncio.gather(*(act(*each) for each in enumerate(self.prompts)))
        return Measured(latencies_s=latencies, num_tokens=num_sampled, seconds=time.perf_counter() - started)
