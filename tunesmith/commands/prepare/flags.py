"""Values of `tunesmith prepare --paraphrase` and `--pass-rate`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from tunesmith.errors import ConfigError

SERVER = re.compile(r"(?P<base_url>https?://.+?/v\d+)/(?P<model>.+)")


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
