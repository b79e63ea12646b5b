"""What a Trinity-RFT file becomes while it is read, and the kinds of rule that its keys have.

A key is moved to one of ours, accepted because what it asks for holds anyway, or refused with the reason and the
nearest thing there is. No key is dropped: what has no rule is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunesmith.arguments import suggest_name
from tunesmith.errors import ConfigError

SHARED_WEIGHTS = "sampler and trainer share one set of weights, and every step samples the newest policy"
ONE_ENGINE = "one engine in this process samples for all runners"
ONE_HELPER_ENGINE = "a helper runs on one engine, beside the trained model or behind base_url"


@dataclass(slots=True)
class Draft:
    """A run file of ours in the making."""

    source: Mapping[str, Any]
    """The file as it was read."""
    values: dict[str, Any] = field(default_factory=dict)
    """Nested values of a run file of ours."""
    notes: list[str] = field(default_factory=list)
    """What is met in another way than the file says."""

    def find(self, key: str, default: Any = None) -> Any:
        """The file's value at a dotted key."""
        found: Any = self.source
        for part in key.split("."):
            if not isinstance(found, Mapping) or found.get(part) is None:
                return default
            found = found[part]
        return found

    def set(self, target: str, value: Any, *, source: str, is_finer: bool = False) -> None:
        """Set a dotted key of ours; a `finer` key of the file overrides a coarser one, else two must agree."""
        *parents, last = target.split(".")
        place = self.values
        for parent in parents:
            place = place.setdefault(parent, {})
        if not is_finer and place.get(last, value) != value:
            raise ConfigError(f"{source}={value!r}: another key of the file says {place[last]!r} for {target}")
        place[last] = value


Rule = Callable[[Draft, str, Any], None]
"""Takes the draft, the key with its place in the file, and its value."""


def move(target: str, convert: Callable[[Any], Any] = lambda value: value) -> Rule:
    """Our key takes the value; None leaves our default."""

    def apply(draft: Draft, key: str, value: Any) -> None:
        if value is not None:
            draft.set(target, convert(value), source=key)

    return apply


def accept(note: str = "", *, silent: Collection[Any] = ()) -> Rule:
    """Any value will do; the note says why, except for `silent` values, which hold as they are."""

    def apply(draft: Draft, key: str, value: Any) -> None:
        if note and value is not None and value not in silent:
            draft.notes.append(f"{key}={value!r}: {note}")

    return apply


def allow(*values: Any, reason: str) -> Rule:
    """These values hold anyway; any other is refused."""

    def apply(draft: Draft, key: str, value: Any) -> None:
        if value is not None and value not in values and str(value).casefold() not in values:
            raise ConfigError(f"{key}={value!r} cannot be honoured: {reason}")

    return apply


def allow_neutral(reason: str) -> Rule:
    """Empty or switched off is fine; anything else is refused."""
    return allow("", 0, False, [], {}, "none", reason=reason)


def walk(draft: Draft, rules: Mapping[str, Rule], values: Mapping[str, Any], *, place: str) -> None:
    """Apply the rule of each key; a mapping without a rule of its own is entered."""
    _walk(draft, rules, values, place=place, prefix="")


def _walk(draft: Draft, rules: Mapping[str, Rule], values: Mapping[str, Any], *, place: str, prefix: str) -> None:
    for name, value in values.items():
        key, whole = f"{prefix}{name}", f"{place}{prefix}{name}"
        if key in rules:
            rules[key](draft, whole, value)
        elif any(known.startswith(f"{key}.") for known in rules):
            if value is not None:
                _walk(draft, rules, read_mapping(value, whole), place=place, prefix=f"{key}.")
        else:
            raise ConfigError(f"{whole} is not a known key: {suggest_name(str(name), list_names(rules, prefix))}")


def list_names(rules: Collection[str], prefix: str) -> list[str]:
    """The names that may stand after a prefix."""
    return list(dict.fromkeys(key.removeprefix(prefix).split(".")[0] for key in rules if key.startswith(prefix)))


def read_mapping(value: Any, key: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} must be a mapping of keys to values, got {value!r}")
    return value


def read_list(value: Any, key: str) -> Sequence[Any]:
    if value is None:
        return []
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{key} must be a list, got {value!r}")
    return value
