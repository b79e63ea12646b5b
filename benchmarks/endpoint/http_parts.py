"""Which parts of the server take how much processor time of a call over HTTP.

Agents in other processes converse with an engine that answers at once, as in the part `cost` of `endpoint.py`. The
stack of the serving process is sampled at fixed intervals of its processor time, and each sample is counted for the
innermost function that `PARTS` names. The figures are the median of several runs; `--no-samples` leaves the samples
out, for the processor time of a call undisturbed.

    python -m benchmarks.endpoint.http_parts --model models/smollm2-135m-instruct --agents 512 \\
        --out results/endpoint/http_parts.json
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from types import FrameType

from benchmarks.endpoint.setup import InstantEngine, Setup
from benchmarks.endpoint.stack_samples import INTERVAL_S
from benchmarks.shared.report import publish
from tunesmith.model.load import load_tokenizer

PARTS = {
    "uvicorn: parse a request": ("HttpToolsProtocol.", "H11Protocol."),
    "uvicorn: send the response": ("RequestResponseCycle.send", "_SelectorSocketTransport.write", "_TimedRequest.send"),
    "uvicorn: cycle, body, disconnect": ("RequestResponseCycle.", "FlowControl.", "ProxyHeadersMiddleware."),
    "guard, time limit of a body": ("SocketGuard.", "_TimedRequest.", "Timeout.", "timeout"),
    "key, body, disconnect": (
        "read_key", "read_header", "read_body", "read_limited_body", "wait_disconnect", "DisconnectWatch.",
        "run_while_connected",
    ),
    "JSON of the request": ("parse_json",),
    "fields": ("RequestParser.", "_parse_options", "build_cache_key"),
    "messages": ("ConversationCache.", "parse_messages", "_parse_message", "Conversation."),
    "template": ("ChatTemplate.", "JinjaTemplate.", "SpecialTokens."),
    "tokenizing": ("Renderer.",),
    "recorder: calls and turns": ("Session.", "OpenTurn.", "Recorder.", "ReplyTexts.", "derive_seed"),
    "engine that answers at once": ("InstantEngine.",),
    "text of the reply": ("Detokenizer.", "ReplyParser.", "IncrementalParser."),
    "body of the response": (
        "PendingCompletion.", "PendingChatCompletion.", "build_message", "build_usage", "create_completion",
    ),
    "JSON of the response": ("encode_json", "_send_json"),
    "endpoint, other": ("ChatEndpoint.", "EndpointApp."),
    "event loop": (
        "BaseSelectorEventLoop.", "BaseEventLoop.", "EpollSelector.", "Handle.", "_SelectorSocketTransport.",
    ),
}  # fmt: skip
"""Functions of each part, by the start of their qualified names."""


class PartSamples:
    """Samples of the stack of the main thread by part."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        """Functions of samples that belong to no part."""
        self._part_of = {name: part for part, names in PARTS.items() for name in names}
        self._known: dict[str, str | None] = {}

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        before = signal.signal(signal.SIGPROF, self._add)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)

    def _find_part(self, name: str) -> str | None:
        if name not in self._known:
            starts = [
                start for start in self._part_of if name == start or (start[-1] == "." and name.startswith(start))
            ]
            self._known[name] = self._part_of[max(starts, key=len)] if starts else None
        return self._known[name]

    def _add(self, number: int, frame: FrameType | None) -> None:
        innermost = frame
        while frame is not None:
            part = self._find_part(frame.f_code.co_qualname)
            if part is not None:
                self.counts[part] += 1
                return
            frame = frame.f_back
        self.counts["other"] += 1
        assert innermost is not None
        self.others[innermost.f_code.co_qualname] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the tokenizer")
    parser.add_argument("--agents", type=int, default=512)
    parser.add_argument("--calls", type=int, default=8, help="turns of each conversation")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens of a reply, on average")
    parser.add_argument("--repeats", type=int, default=5, help="measured runs, after one warm-up")
    parser.add_argument("--way", choices=["http", "in process", "no client"], default="http")
    parser.add_argument("--no-samples", action="store_true")
    parser.add_argument("--out", help="JSON file for the result, results/endpoint/NAME.json")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.model)
    setup = Setup(InstantEngine(tokenizer), tokenizer, model=arguments.model)
    shape = {"num_calls": arguments.calls, "num_tokens": arguments.new_tokens, "is_growing": True}
    samples, costs = PartSamples(), []
    gc.freeze()
    for repeat in range(arguments.repeats + 1):
        with samples.taking() if repeat and not arguments.no_samples else contextlib.nullcontext():
            started = time.perf_counter()
            measured = setup.run(setup.ways[arguments.way], arguments.agents, **shape)
            seconds = time.perf_counter() - started
        assert measured.cpu_s is not None
        cost_us = 1e6 * measured.cpu_s / len(measured.latencies_s)
        print(f"{seconds:.2f} s, {cost_us:.1f} us of processor time a call", flush=True)
        costs += [cost_us] if repeat else []
    cost_us, num_samples = statistics.median(costs), sum(samples.counts.values())
    parts = {part: cost_us * count / num_samples for part, count in samples.counts.most_common()}
    for part, us in parts.items():
        print(f"{us:8.1f} us {100 * us / cost_us:5.1f} %  {part}")
    for name, count in samples.others.most_common(8):
        print(f"{'':8} other: {cost_us * count / num_samples:.1f} us {name}")
    publish(
        name="http_parts", unit="microseconds of processor time a call", ours=cost_us, peers={}, device="cpu",
        details={"way": arguments.way, "agents": arguments.agents, **shape, "costs_us": costs, "parts_us": parts},
        out=arguments.out,
    )  # fmt: skip


if __name__ == "__main__":
    main()
