"""What all sections of configuration share."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A group of knobs that refuses unknown keys and names the nearest known one."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _name_nearest_key(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for key in values:
            if key not in cls.model_fields:
                close = difflib.get_close_matches(str(key), cls.model_fields, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(cls.model_fields)}"
                raise PydanticCustomError("unknown_key", "unknown key {key}: {hint}", {"key": str(key), "hint": hint})
        return values
