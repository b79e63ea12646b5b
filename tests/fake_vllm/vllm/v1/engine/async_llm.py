from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

VOCAB_SIZE = 97


class FlatLogprobs:
    """The sampled token first, then the most likely ones, at each position."""

    def __init__(self, rows: list[dict[int, float]]) -> None:
        self.rows = rows
        self.start_indices, self.token_ids, self.logprobs = [], [], []
        for row in rows:
            self.start_indices.append(len(self.token_ids))
            self.token_ids += row.keys()
            self.logprobs += row.values()

    def __getitem__(self, index: int) -> dict[int, Any]:
        return {token: SimpleNamespace(logprob=logprob) for token, logprob in self.rows[index].items()}


class AsyncLLM:
    """Writes what it is asked to do to `calls.jsonl` in the model's folder, and has a process of its own."""

    def __init__(self, args: Any) -> None:
        self.args, self.folder = args, Path(args.model)
        self.aborted: set[str] = set()
        self.running: set[str] = set()
        self.num_received = 0
        self.record("start", **asdict(args))
        (architecture,) = json.loads((self.folder / "config.json").read_text())["architectures"] or [""]
        if args.runner != "generate" or not architecture.endswith("ForCausalLM"):
            raise ValueError(
                "1 validation error\n  This model does not support `--runner generate`. [type=value_error]"
            )
        if args.log:
            print(args.log, flush=True)
            raise RuntimeError("Engine core initialization failed. See root cause above.")
        self.worker = subprocess.Popen(["sleep", "600"])
        (self.folder / "pids").write_text(f"{os.getpid()} {self.worker.pid}\n")

    @classmethod
    def from_engine_args(cls, args: Any) -> AsyncLLM:
        return cls(args)

    def record(self, call: str, **values: Any) -> None:
        with (self.folder / "calls.jsonl").open("a") as file:
            file.write(json.dumps({"call": call} | values) + "\n")

    async def generate(self, prompt: dict[str, list[int]], sampling: Any, name: str) -> AsyncIterator[Any]:
        ids = prompt["prompt_token_ids"]
        options = {key: value for key, value in vars(sampling).items() if key != "output_kind"}
        self.record("generate", name=name, prompt=ids, **options)
        await asyncio.sleep(2 * self.args.seconds_per_token)  # vLLM ignores aborts of requests it has not admitted
        self.running.add(name)
        sent, token = 0, ids[-1]
        finish = None
        pending: list[int] = []
        while finish is None:
            await asyncio.sleep(self.args.seconds_per_token)
            if sent >= self.read_limit() and name not in self.aborted:
                continue
            if name not in self.aborted:
                token = (token + 1) % VOCAB_SIZE
                pending.append(token)
                sent += 1
            if token == self.args.last_token:
                os._exit(3)
            if name in self.aborted:
                finish = "abort"
            elif token in sampling.stop_token_ids:
                finish = "stop"
            elif sent == sampling.max_tokens:
                finish = "length"
            if finish is not None or len(pending) == self.args.stream_interval:
                yield self.output(pending, sampling.logprobs, finish)
                pending = []
        self.running.discard(name)

    def read_limit(self) -> float:
        """Tokens after which requests wait until they are aborted, which tests write to a file."""
        try:
            return float((self.folder / "limit").read_text())
        except FileNotFoundError:
            return float("inf")

    def output(self, ids: list[int], num_top: int, finish: str | None) -> Any:
        rows = [
            {token: -0.5 - 0.001 * token}
            | {(token + shift) % VOCAB_SIZE: -1.0 * shift for shift in range(1, num_top + 1)}
            for token in ids
        ]
        completion = SimpleNamespace(token_ids=ids, logprobs=FlatLogprobs(rows) if ids else None, finish_reason=finish)
        return SimpleNamespace(outputs=[completion], num_cached_tokens=0)

    async def abort(self, names: list[str]) -> None:
        self.record("abort", names=names)
        self.aborted |= self.running & set(names)

    async def reset_prefix_cache(self) -> bool:
        self.record("reset_prefix_cache")
        return not self.running

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> None:
        self.record(method)
        if method == "receive_push":
            self.num_received += 1
            folder = (self.args.additional_config or {}).get("received", self.folder)
            shutil.copy(args[2], Path(folder) / f"received-{self.num_received}.safetensors")

    def shutdown(self) -> None:
        self.worker.kill()
