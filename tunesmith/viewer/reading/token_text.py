"""Token ids as text, with the run's own `tokenizer.json` and the tokenizers library alone, and how its model writes
reasoning and tool calls: as the run's config says, or as the chat template shows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from tunesmith.chat.parsers import CALL_FORMATS, REASONING_TAGS, find_call_format, find_reasoning_parser
from tunesmith.chat.parsers.call_format import CallFormat
from tunesmith.chat.parsers.hermes import HERMES
from tunesmith.chat.parsers.reply import THINK, ReasoningTags
from tunesmith.errors import StorageError
from tunesmith.runs.record import RunRecord
from tunesmith.storage import load_json

ALWAYS_SHOWN = frozenset({"<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyFormat:
    """The formats of one model's replies."""

    call_format: CallFormat = HERMES
    tags: ReasoningTags = THINK

    @property
    def shown_controls(self) -> frozenset[str]:
        """Control tokens that the parser reads."""
        return ALWAYS_SHOWN | {self.tags.opening, self.tags.closing, *self.call_format.markup}

    def may_call(self, text: str) -> bool:
        """Whether a reply contains the start of a tool call."""
        return any(opener in text for opener in (*self.call_format.openers, *self.call_format.first_openers))


def find_reply_format(folder: Path, config: Mapping[str, Any]) -> ReplyFormat:
    """The formats of a run, whose tokenizer is in `folder`."""
    model = config.get("model")
    given = model if isinstance(model, dict) else {}
    template = read_template(folder)
    named = CALL_FORMATS.get(str(given.get("tool_call_parser")))
    reasoning = given.get("reasoning_parser", "auto")
    if reasoning == "auto":
        reasoning = find_reasoning_parser(template)
    return ReplyFormat(call_format=named or find_call_format(template), tags=REASONING_TAGS.get(str(reasoning), THINK))


def read_template(folder: Path) -> str:
    """The source of the chat template that is saved with a tokenizer; empty if there is none."""
    own, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    template = load_json(config).get("chat_template", "") if config.is_file() else ""
    return template if isinstance(template, str) else json.dumps(template, ensure_ascii=False)


TOKENIZER = "tokenizer.json"
OPEN, CLOSE = "\x02", "\x03"
"""Around a control token in `decode_marked`; sampled text cannot contain them, they are replaced."""


class TokenText:
    """Decodes the token ids of one run."""

    def __init__(self, path: Path, reply_format: ReplyFormat = ReplyFormat()) -> None:
        self.reply_format = reply_format
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises its base class for damaged files
            raise StorageError(f"cannot read {path}: it is not a tokenizer ({error})") from error
        added = self._tokenizer.get_added_tokens_decoder()
        self._control_ids = {token_id: token.content for token_id, token in added.items() if token.special}

    def split(self, ids: Sequence[int]) -> list[str]:
        """The text of each token. A character of several tokens is the text of the last one, the others are empty."""
        stream, pieces = DecodeStream(skip_special_tokens=False), []
        for token_id in ids:
            try:
                piece = stream.step(self._tokenizer, token_id)
            except Exception:  # noqa: BLE001 - the library raises its base class for invalid sequences
                stream, piece = DecodeStream(skip_special_tokens=False), self._tokenizer.id_to_token(token_id)
            known = piece is not None or self._tokenizer.id_to_token(token_id) is not None
            pieces.append((piece or "") if known else f"<{token_id}>")
        return pieces

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        """The text of several lists of ids, with control tokens."""
        return self._tokenizer.decode_batch([list(ids) for ids in batch], skip_special_tokens=False)

    def decode_marked(self, ids: Sequence[int]) -> str:
        """The text with each control token between `OPEN` and `CLOSE`: text that spells one is not marked."""
        parts: list[str] = []
        run: list[int] = []
        for token_id in ids:
            if token_id in self._control_ids:
                parts.append(self._decode_plain(run) + f"{OPEN}{self._control_ids[token_id]}{CLOSE}")
                run = []
            else:
                run.append(token_id)
        return "".join([*parts, self._decode_plain(run)])

    def _decode_plain(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
        return text.replace(OPEN, "\ufffd").replace(CLOSE, "\ufffd")


def find_tokenizer(run: RunRecord) -> Path | None:
    """The tokenizer in the folder of a run. Earlier versions kept it in checkpoints alone; then there may be none but
    that of the model, if its path is a folder."""
    model = run.settings.get("model")
    given = [model.get(key) for key in ("path", "base_path")] if isinstance(model, dict) else []
    folders = [
        run.paths.tokenizer,
        *reversed(run.checkpoints),
        *(Path(str(name)).expanduser() for name in given if name),
    ]
    return next((folder / TOKENIZER for folder in folders if (folder / TOKENIZER).is_file()), None)
