"""CUDA graphs of one model: captured once for each key, in one memory pool, and dropped together.

A graph reads the parameters at the addresses that they had when it was captured. Updates in place keep it valid; when a
parameter moves, every graph of the model reads freed memory, so the owner asks `has_moved` before it replays and calls
`clear`.

The graphs of a store share a memory pool: what one of them writes, the replay of another may overwrite. Copy an output
that must outlast the next replay.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch import nn

Output = TypeVar("Output")


@dataclass(frozen=True, slots=True)
class CapturedGraph(Generic[Output]):
    """A graph, and what the captured function returned: tensors that each replay writes again."""

    graph: torch.cuda.CUDAGraph
    output: Output

    def replay(self) -> Output:
        self.graph.replay()
        return self.output


class GraphStore(Generic[Output]):
    """The graphs of one kind by key, such as the number of rows."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._graphs: dict[Hashable, CapturedGraph[Output]] = {}
        self._addresses = self._list_addresses()
        # One pool for all graphs, because they never run at the same time: what each needs for its intermediate results
        # is then allocated once, for the largest, and not once for each of twenty sizes.
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream | None = None
        """Where graphs are captured if torch's own stream for captures is of another GPU: that of the process's first
        capture, which it would make the current one."""

    def __len__(self) -> int:
        return len(self._graphs)

    def __iter__(self) -> Iterator[Hashable]:
        """The keys of the captured graphs."""
        return iter(self._graphs)

    def find(self, key: Hashable) -> CapturedGraph[Output] | None:
        return self._graphs.get(key)

    def has_moved(self) -> bool:
        """Whether a parameter has moved since the store was made or cleared."""
        return self._list_addresses() != self._addresses

    def clear(self) -> None:
        """Drop the graphs; later ones read the parameters where they are now."""
        self._graphs.clear()
        self._addresses = self._list_addresses()
        self._pool = torch.cuda.graph_pool_handle()  # the old pool is freed with its last graph

    def capture(self, key: Hashable, run: Callable[[], Output], *, num_warmups: int = 2) -> CapturedGraph[Output]:
        """Run a function to warm up, then capture it; its inputs are the tensors that it reads, at their addresses.

        The store keeps what the function returns, but not the function: the output must hold every tensor that the
        graph reads and that nobody else keeps.
        """
        # The first run compiles kernels, and libraries create handles and workspaces: nothing of that may be captured.
        # It is on a side stream, as torch asks for before a capture.
        if num_warmups:
            stream = _find_warmup_stream(torch.cuda.current_device())
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(num_warmups):
                    run()
            torch.cuda.current_stream().wait_stream(stream)
        usual = torch.cuda.graph.default_capture_stream
        if usual is not None and usual.device.index != torch.cuda.current_device():
            self._stream = self._stream or torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        # other threads may call CUDA during the capture: NCCL's watchdog queries events, agents may use the device
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = run()
        self._graphs[key] = CapturedGraph(graph, output)
        return self._graphs[key]

    def _list_addresses(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._model.parameters()]


@cache
def _find_warmup_stream(device: int) -> torch.cuda.Stream:
    """One for each GPU: cuBLAS keeps a workspace for every stream on which it has run, 32 MiB on an H200."""
    return torch.cuda.Stream(device)
