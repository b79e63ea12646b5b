"""The program of the vLLM process: token ids in, token ids and logprobs out, over one socket.

Runs in the interpreter that has vLLM and imports nothing of this package. Arguments: the descriptor of a connected
socket, and the engine's arguments as JSON. Frames are a length (four bytes, big-endian) and JSON. From the parent:
`generate` (id, prompt, params), `abort` (ids) and `call` (seq, method, arguments in order). To the parent:
lists of events of requests (id, ids, logprobs, top logprobs, finish reason) and replies (seq, result or error). Each
`generate` has exactly one event with a finish reason. When the parent is gone, the process ends with all that it has
started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Coroutine
from dataclasses import fields
from typing import Any

FLUSH_INTERVAL_S = 0.002
"""Events of this time are sent in one frame."""
WATCH_INTERVAL_S = 0.5
ABORT_INTERVAL_S = 0.05
EXIT_GRACE_S = 12.0


class VllmServer:
    """One AsyncLLM, and the requests of the parent in it."""

    def __init__(self, llm: Any, writer: asyncio.StreamWriter) -> None:
        self._llm = llm
        self._writer = writer
        self._events: list[dict[str, Any]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._requests: dict[int, tuple[str, asyncio.Task[None]]] = {}
        """The last submission of each request: vLLM's id of it, and its task."""
        self._num_requests = 0

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Serve until the parent closes the socket or is gone."""
        while True:
            try:
                size = int.from_bytes(await reader.readexactly(4), "big")
                message = json.loads(await reader.readexactly(size))
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            if message["op"] == "generate":
                self._num_requests += 1
                name = f"{message['id']}-{self._num_requests}"
                self._requests[message["id"]] = name, self._start(self._generate(message, name))
            elif message["op"] == "abort":
                self._start(self._abort([self._requests[each] for each in message["ids"] if each in self._requests]))
            else:
                self._start(self._call(message))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _abort(self, requests: list[tuple[str, asyncio.Task[None]]]) -> None:
        """Abort until the requests have ended: vLLM ignores those that it has not admitted yet."""
        while running := {name: task for name, task in requests if not task.done()}:
            await self._llm.abort(list(running))
            await asyncio.wait(running.values(), timeout=ABORT_INTERVAL_S)

    async def _generate(self, message: dict[str, Any], name: str) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        event: dict[str, Any] = {"id": message["id"]}
        try:
            params = dict(message["params"])
            if "logit_bias" in params:
                params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
            sampling = SamplingParams(
                detokenize=False, flat_logprobs=True, output_kind=RequestOutputKind.DELTA, **params
            )
            prompt = {"prompt_token_ids": message["prompt"]}
            finish_reason = None
            async for output in self._llm.generate(prompt, sampling, name):
                (completion,) = output.outputs
                event = {"id": message["id"], "cached": output.num_cached_tokens or 0}
                event |= read_tokens(completion, has_top=params["logprobs"] > 0)
                finish_reason = completion.finish_reason
                if finish_reason is None:
                    self._post(event)
            self._end(message["id"], name)
            self._post(event | {"finish": finish_reason or "abort"})
        except Exception as error:  # noqa: BLE001 - the parent reports it
            self._end(message["id"], name)
            self._post({"id": message["id"], "finish": "error", "error": describe(error)})

    def _end(self, request_id: int, name: str) -> None:
        if self._requests[request_id][0] == name:
            del self._requests[request_id]

    async def _call(self, message: dict[str, Any]) -> None:
        try:
            result = None
            if message["method"] == "reset_cache":
                result = await self._reset_cache()
            else:  # a method of the workers (`receiver.py`)
                await self._llm.collective_rpc(message["method"], args=tuple(message["arguments"].values()))
            self._post({"seq": message["seq"], "result": result})
        except Exception as error:  # noqa: BLE001 - the parent reports it
            self._post({"seq": message["seq"], "error": describe(error)})

    async def _reset_cache(self) -> bool:
        """Drop the cached keys and values of finished requests; False while some are in use."""
        for _ in range(50):
            if await self._llm.reset_prefix_cache() is not False:
                return True
            await asyncio.sleep(0.02)  # blocks of an aborted request are freed a step late
        return False

    def _post(self, event: dict[str, Any]) -> None:
        if not self._events:
            asyncio.get_running_loop().call_later(FLUSH_INTERVAL_S, self._flush)
        self._events.append(event)

    def _flush(self) -> None:
        events, self._events = self._events, []
        self._writer.write(frame(events))


def read_tokens(completion: Any, *, has_top: bool) -> dict[str, Any]:
    """New token ids and their logprobs, and with `has_top` the most likely tokens of each position."""
    ids, flat = list(completion.token_ids), completion.logprobs
    starts = flat.start_indices[: len(ids)] if ids else []
    assert ids == [flat.token_ids[start] for start in starts], "the sampled token is the first of its position"
    event: dict[str, Any] = {"ids": ids, "logprobs": [flat.logprobs[start] for start in starts]}
    if has_top:
        rows = [{token: each.logprob for token, each in flat[index].items()} for index in range(len(ids))]
        event["top"] = [sorted(row.items(), key=lambda item: -item[1]) for row in rows]
    return event


def frame(message: Any) -> bytes:
    body = json.dumps(message).encode()
    return len(body).to_bytes(4, "big") + body


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def build_llm(arguments: dict[str, Any]) -> tuple[Any, str]:
    """The engine, and vLLM's version."""
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    known = {field.name for field in fields(AsyncEngineArgs)}
    if unknown := sorted(arguments.keys() - known):
        raise TypeError(f"AsyncEngineArgs of vLLM {vllm.__version__} has no argument {unknown[0]!r}")
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)), vllm.__version__


def end_process_group() -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(os.getpgid(0), signal.SIGKILL)


def watch_parent(parent: int) -> None:
    """End the process group when the parent is gone, even if the event loop is busy."""
    while os.getppid() == parent:
        time.sleep(WATCH_INTERVAL_S)
    time.sleep(EXIT_GRACE_S)  # the event loop ends by itself when the socket is closed, unless it is blocked
    end_process_group()


async def run(connection: socket.socket, arguments: dict[str, Any]) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=2**26)
    try:
        llm, version = build_llm(arguments)
    except Exception as error:
        writer.write(frame([{"seq": 0, "error": describe(error)}]))
        await writer.drain()
        raise
    server = VllmServer(llm, writer)
    writer.write(frame([{"seq": 0, "result": version}]))
    await server.serve(reader)
    threading.Timer(EXIT_GRACE_S, end_process_group).start()
    llm.shutdown()


def main() -> None:
    sys.path.pop(0)  # this file's folder, whose names are not those of packages
    threading.Thread(target=watch_parent, args=(os.getppid(),), daemon=True).start()
    try:
        asyncio.run(run(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])))
    finally:
        sys.stderr.flush()
        end_process_group()


if __name__ == "__main__":
    main()
