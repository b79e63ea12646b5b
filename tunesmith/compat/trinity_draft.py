"""The translation state of a Trinity-RFT file, and the kinds of rules for its keys.

A key is moved to a key of ours, accepted without effect, or refused with the reason and the nearest alternative. No key
is dropped silently: a key without a rule is an error. Refusals are collected, so that one answer has all of a file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tunesmith.arguments import suggest_name
from tunesmith.errors import ConfigError

ONE_AUXILIARY_ENGINE = "each rank runs an auxiliary model on one engine of its own, or asks the server at base_url"


@dataclass(slots=True)
class Draft:
    """A run file of ours under construction."""

    source: Mapping[str, Any]
    """The Trinity-RFT file."""
    values: dict[str, Any] = field(default_factory=dict)
    """Nested values of our run file."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the user about settings that have another effect than in Trinity-RFT."""
    problems: list[str] = field(default_factory=list)
    """Refusals, in the order of the file; each starts with the key."""

    @contextmanager
    def collecting_problems(self) -> Iterator[None]:
        """Within, a refusal is collected once, whichever of several keys is refused for the same reason."""
        try:
            yield
        except ConfigError as error:
            if str(error) not in self.problems:
                self.problems.append(str(error))

    def find(self, key: str, default: Any = None, *, kind: type | None = None) -> Any:
        """The file's value at a dotted key; with `kind`, ConfigError for one of another type."""
        found: Any = self.source
        for part in key.split("."):
            if not isinstance(found, Mapping) or found.get(part) is None:
                return default
            found = found[part]
        return found if kind is None else read_type(found, key, kind)

    def find_mapping(self, key: str) -> Mapping[str, Any]:
        return read_mapping(self.find(key), key)

    def open_section(self, *names: str) -> dict[str, Any]:
        """A section of ours, added if there is none."""
        section = self.values
        for name in names:
            section = section.setdefault(name, {})
        return section

    def set(self, target: str, value: Any, *, source: str, is_finer: bool = False) -> None:
        """Set a dotted key of ours; raises if another key has set a different value, unless `is_finer` overrides it."""
        *parents, last = target.split(".")
        section = self.open_section(*parents)
        if not is_finer and last in section and section[last] != value:
            raise ConfigError(f"{source}={value!r}: another key of the file sets {target} to {section[last]!r}")
        section[last] = value


Rule = Callable[[Draft, str, Any], None]
"""Takes the draft, the dotted key in the file, and its value."""


def move(
    target: str, convert: Callable[[Any], Any] = lambda value: value, *, section: dict[str, Any] | None = None
) -> Rule:
    """Set our key to the value, or that of a section which is built apart from the draft; None keeps our default."""

    def apply(draft: Draft, key: str, value: Any) -> None:
        if value is not None:
            owner = draft if section is None else replace(draft, values=section)
            owner.set(target, convert(value), source=key)

    return apply


def accept(note: str = "", *, silent: Collection[Any] = ()) -> Rule:
    """Accept any value without effect; `note` gives the reason, except for `silent` values, which hold anyway."""

    def apply(draft: Draft, key: str, value: Any) -> None:
        if note and value is not None and value not in silent:
            draft.notes.append(f"{key}={value!r} has no effect: {note}")

    return apply


def allow(*values: Any, reason: str) -> Rule:
    """Accept these values, which hold anyway; refuse any other."""

    def apply(draft: Draft, key: str, value: Any) -> None:
        if value is not None and value not in values and str(value).casefold() not in values:
            raise ConfigError(f"{key}={value!r} is not supported: {reason}")

    return apply


def allow_neutral(reason: str) -> Rule:
    """Accept empty and disabled values; refuse any other."""
    return allow("", 0, False, [], {}, "none", reason=reason)


def walk(draft: Draft, rules: Mapping[str, Rule], values: Mapping[str, Any], *, parent: str, prefix: str = "") -> None:
    """Apply the rule of each key; nested mappings without a rule are walked."""
    for name, value in values.items():
        key, whole = f"{prefix}{name}", f"{parent}{prefix}{name}"
        if key in rules:
            with draft.collecting_problems():
                rules[key](draft, whole, value)
        elif any(known.startswith(f"{key}.") for known in rules):
            if value is not None:
                with draft.collecting_problems():
                    walk(draft, rules, read_mapping(value, whole), parent=parent, prefix=f"{key}.")
        else:
            hint = suggest_name(str(name), list_names(rules, prefix))
            draft.problems.append(f"{whole} is not a known key: {hint}")


def list_names(rules: Collection[str], prefix: str) -> list[str]:
    return list(dict.fromkeys(key.removeprefix(prefix).split(".")[0] for key in rules if key.startswith(prefix)))


def read_type(value: Any, key: str, kind: type) -> Any:
    """The value as a number or a name. Trinity-RFT reads numbers in quotes too, such as environment variables."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{key} must be {TYPE_NAMES[kind]}, got {value!r}") from error


TYPE_NAMES = {int: "a whole number", float: "a number", str: "a name"}


def read_mapping(value: Any, key: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} must be a mapping of keys to values, got {value!r}")
    return value


def read_mappings(value: Any, key: str) -> list[Mapping[str, Any]]:
    return [read_mapping(each, f"{key}[{number}]") for number, each in enumerate(read_list(value, key))]


def read_list(value: Any, key: str) -> Sequence[Any]:
    if value is None:
        return []
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{key} must be a list, got {value!r}")
    return value
