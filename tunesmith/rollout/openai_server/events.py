"""Server-sent events of a streamed response: what each API makes of the chunks of a chat completion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from tunesmith.rollout.openai_server.response import END_OF_STREAM, build_error, encode_event, encode_json


class Events(Protocol):
    """Turns the chunks of one response into encoded events."""

    end_of_stream: bytes
    """What follows the last event."""

    def translate(self, chunk: dict[str, Any]) -> Iterable[bytes]:
        """Events of the next chunk."""
        ...

    def finish(self) -> Iterable[bytes]:
        """Events after the last chunk."""
        ...

    def fail(self, message: str) -> bytes:
        """The event of an engine error or an ended session after the first event."""
        ...


class ChunkEvents:
    """The chunks themselves, as chat completions and completions send them."""

    end_of_stream = END_OF_STREAM

    def translate(self, chunk: dict[str, Any]) -> Iterable[bytes]:
        return (encode_event(chunk),)

    def finish(self) -> Iterable[bytes]:
        return ()

    def fail(self, message: str) -> bytes:
        return encode_event(build_error(message, status=500))


def encode_named_event(event: Mapping[str, Any]) -> bytes:
    """An event whose name is its field `type`."""
    return b"event: " + str(event["type"]).encode() + b"\ndata: " + encode_json(event) + b"\n\n"
