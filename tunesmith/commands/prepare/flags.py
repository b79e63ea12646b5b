"""Command-line flags of `tunesmith prepare` as configuration values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from tunesmith.errors import ConfigError

SERVER = re.compile(r"(?P<base_url>https?://.+?/v\d+)/(?P<model>.+)")


def collect_values(
    *,
    data: str | None = None,
    data_name: str | None = None,
    eval_data: str | None = None,
    eval_name: str | None = None,
    style: str | None = None,
    paraphrase: str | None = None,
    pass_rate: Sequence[str] = (),
    samples: int | None = None,
    max_rows: int | None = None,
) -> dict[str, Any]:
    """Nested configuration values of the flags that were set."""
    values: dict[str, Any] = {
        "data": drop_none({"path": data, "name": data_name}),
        "eval_data": drop_none({"path": eval_data, "name": eval_name}),
        "style": style,
        "paraphrase": None if paraphrase is None else parse_server_url(paraphrase),
        "pass_rate": drop_none({"models": parse_model_names(pass_rate) or None, "num_samples": samples}),
        "max_rows": max_rows,
    }
    return {key: value for key, value in values.items() if value not in (None, {})}


def drop_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def parse_server_url(text: str) -> dict[str, str]:
    """Split `http://localhost:8000/v1/my-model` into base URL and model name."""
    found = SERVER.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"--paraphrase {text!r} is not of the form BASE_URL/MODEL, as in http://localhost:8000/v1/my-model"
        )
    return found.groupdict()


def parse_model_names(models: Sequence[str]) -> dict[str, dict[str, str]]:
    """Parse `NAME=MODEL`, or MODEL alone, whose last part in lower case with underscores for dashes is the name."""
    named: dict[str, dict[str, str]] = {}
    for each in models:
        name, equals, path = each.partition("=")
        if not equals:
            name, path = PurePosixPath(each).name.lower().replace("-", "_"), each
        if name in named:
            raise ConfigError(f"--pass-rate names two models {name!r}; give each column its own name with NAME=MODEL")
        named[name] = {"path": path}
    return named
