"""Terms of rules in llguidance's Lark notation: text, tags, JSON values; and the import of llguidance, an option."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from tunesmith.errors import ConfigError

JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\t]{0,32}"}
SPACE = r"/[ \n]{0,2}/"
"""Whitespace between the parts of a tool call."""


def write_tag(text: str, token_id: int | None) -> str:
    """A term for a tag: its token, if it is one, else its text."""
    return quote(text) if token_id is None else f"<[{token_id}]>"


def quote(text: str) -> str:
    """A term for text."""
    return json.dumps(text, ensure_ascii=False)


def write_json(schema: Mapping[str, Any], *, is_lenient: bool = False) -> str:
    """A term for a JSON value; keywords that no grammar expresses are refused, or not enforced if `is_lenient`."""
    options = JSON_OPTIONS | {"lenient": is_lenient}
    return f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}"


def has_llguidance() -> bool:
    """Whether replies can be constrained by grammars."""
    return find_spec("llguidance") is not None


def load_llguidance() -> Any:
    """The package, with its adapter for transformers' tokenizers."""
    if not has_llguidance():
        raise ConfigError("grammars need llguidance: pip install 'tunesmith[grammar]'")
    import llguidance.hf  # optional

    return llguidance
