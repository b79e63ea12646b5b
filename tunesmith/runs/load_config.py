"""Read the files of commands into their configs, and write them back.

Files are YAML read by OmegaConf: `${oc.env:VAR,default}`, `${other.key}` and `1e-6` work. Dotted overrides take
precedence over the file. Errors name the dotted key, the value and what is allowed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tunesmith.config import Section
from tunesmith.config.section import Needs, Unused
from tunesmith.errors import ConfigError, first_line

AnySection = TypeVar("AnySection", bound=Section)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One knob as `tunesmith config --options` lists it."""

    key: str
    """Dotted path; `<name>` stands for a name chosen by the user."""
    type: str
    default: str
    needs: str
    """The condition under which the knob has an effect; empty if it always has one."""
    description: str


def load_section(
    kind: type[AnySection],
    path: Path | str | None,
    overrides: Sequence[str] = (),
    *,
    values: Mapping[str, Any] | None = None,
    base: Mapping[str, Any] | None = None,
) -> AnySection:
    """Read a command's file, or use `base` in its place, then apply nested `values`, then `a.b=value` overrides."""
    return build_section(kind, load_values(path, overrides, values=values, base=base))


def change_section(
    section: AnySection, overrides: Sequence[str], *, values: Mapping[str, Any] | None = None
) -> AnySection:
    """The section with nested `values` and then `a.b=value` overrides applied; keys that were not set stay unset."""
    if not overrides and not values:
        return section
    base = section.model_dump(mode="json", exclude_unset=True)
    return load_section(type(section), None, overrides, values=values, base=base)


def drop_overridden(merged: DictConfig, layer: Mapping[str, Any]) -> None:
    """Remove from `merged` what `layer` replaces instead of merging with: training sets that it does not list, held-out
    sets if it empties them, and the settings of another selector."""
    if isinstance(layer.get("eval_datasets"), Mapping) and not layer["eval_datasets"]:
        merged.pop("eval_datasets", None)
    below, above = merged.get("train_datasets"), layer.get("train_datasets")
    if isinstance(below, DictConfig) and isinstance(above, Mapping):
        for name in set(below) - set(above):
            del below[name]
        for name in below:
            drop_other_selector(below[name], above[name])
    drop_other_selector(merged.get("train_dataset"), layer.get("train_dataset"))


def drop_other_selector(below: Any, section: Any) -> None:
    """Remove a data set's selector settings if a later layer chooses another selector."""
    if not isinstance(below, DictConfig) or not isinstance(section, Mapping):
        return
    old, given = below.get("task_selector"), section.get("task_selector")
    if not isinstance(old, DictConfig) or not isinstance(given, Mapping):
        return
    if given.get("selector_type") not in (None, old.get("selector_type")):
        del below["task_selector"]


def load_values(
    path: Path | str | None,
    overrides: Sequence[str] = (),
    *,
    values: Mapping[str, Any] | None = None,
    base: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The plain values of `load_section`, with interpolations resolved; not validated."""
    merged = OmegaConf.create() if path is None else load_yaml(Path(path))
    for layer in (base, values):
        if layer:
            drop_overridden(merged, layer)
            merged = OmegaConf.merge(merged, OmegaConf.create(escape_interpolations(dict(layer))))
            assert isinstance(merged, DictConfig)
    for override in overrides:
        apply_override(merged, override)
    try:
        resolved = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or path}: {describe_unresolved(error)}") from error
    assert isinstance(resolved, dict)
    for override in overrides:
        check_variable(override.partition("=")[0].strip(), merged, resolved)
    return resolved


def check_variable(key: str, merged: DictConfig, resolved: dict[str, Any]) -> None:
    """Raise if `key` is one of a pipeline's own `variables`, and no other key changes with it."""
    if not key.startswith("variables."):
        return
    probe = copy.deepcopy(merged)
    OmegaConf.update(probe, key, "a value that no file has")
    try:
        changed: Any = OmegaConf.to_container(probe, resolve=True)
    except OmegaConfBaseException:  # a part of the variable is used
        return
    if changed | {"variables": None} == resolved | {"variables": None}:
        raise ConfigError(
            f"{key} has no effect: no key of the file has ${{{key}}}. Anchors (&) are copied before it is set; set the "
            "keys of the stages"
        )


def describe_unresolved(error: OmegaConfBaseException) -> str:
    """What is wrong with an interpolation, for instance that a variable is not set."""
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", first_line(error)).strip("\"'")


def load_yaml(path: Path) -> DictConfig:
    """Read a YAML file that holds one mapping."""
    try:
        loaded = OmegaConf.load(path)
    except FileNotFoundError as error:
        raise ConfigError(f"config file {path} does not exist") from error
    except IsADirectoryError as error:
        raise ConfigError(describe_folder(path)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file {path}: {first_line(error)}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {error.full_key or 'a value'}: {first_line(error)}") from error
    except (yaml.YAMLError, RecursionError) as error:
        if is_too_deep(error):
            raise ConfigError(f"{path} is nested too deeply to be read") from error
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path} must hold a mapping of keys to values, not a list")
    return loaded


def is_too_deep(error: Exception) -> bool:
    """Whether YAML could not be read for its depth, which newer versions of PyYAML limit themselves."""
    return isinstance(error, RecursionError) or "maximum nesting depth" in str(error)


def describe_folder(path: Path) -> str:
    """That a folder is not a config file, and which files in it are."""
    message = f"cannot read the config file {path}: it is a folder"
    if (path / "config.yaml").is_file():
        return f"{message}; its file is {path / 'config.yaml'}, which resumes a run with --resume"
    files = ", ".join(sorted(str(each) for each in path.glob("*.y*ml"))[:5])
    return f"{message}; it holds {files}" if files else message


def apply_override(config: DictConfig, override: str) -> None:
    """Set one dotted key of the config to a YAML value. A mapping is merged into the existing one; `{}` empties it."""
    key, equals, _ = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"override {override!r} must have the form key=value, for instance trainer.learning_rate=1e-5"
        )
    try:
        given = OmegaConf.from_dotlist([override])
        config.merge_with(given)
        # an interpolation refers to the whole file, so it is resolved with it
        if OmegaConf.select(given, key.strip(), throw_on_resolution_failure=False) == {}:
            OmegaConf.update(config, key.strip(), {}, merge=False)
    except (OmegaConfBaseException, yaml.YAMLError, RecursionError) as error:
        if is_too_deep(error):
            raise ConfigError(f"the value of the override of {key.strip()} is nested too deeply to be read") from error
        raise ConfigError(f"override {override!r} cannot be applied: {first_line(error)}") from error


def build_section(kind: type[AnySection], values: Mapping[str, Any]) -> AnySection:
    """Validate plain values; all errors are joined into one `ConfigError`, less those of a list whose item has one: a
    tuple without its invalid items is too short as well."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        errors = error.errors()
        lists = {each["loc"][:-1] for each in errors if each["loc"] and isinstance(each["loc"][-1], int)}
        kept = (describe_validation_error(each) for each in errors if each["loc"] not in lists)
        raise ConfigError("; ".join(kept)) from error


def describe_validation_error(error: ErrorDetails) -> str:
    """One clause for a validation error: the dotted key, what is allowed and the value."""
    # of a field of several types, pydantic adds the one that did not fit to the key: str, tuple[str, ...]
    kind, parts = error["type"], [part for part in map(str, error["loc"]) if not re.fullmatch(r"str|\w+\[.*\]", part)]
    if kind == "unknown_key":
        context = error["ctx"]
        return f"{'.'.join([*parts, context['key']])} is not a known key: {context['hint']}"
    key = ".".join(parts)
    if kind == "missing":
        return f"{key} is required"
    if kind == "value_error":
        message = error["msg"].removeprefix("Value error, ")
        return f"{key}: {message}" if key else message
    types = {"tuple_type": "must be a list", "model_type": "must be a mapping of keys to values"}
    return f"{key} {types.get(kind) or error['msg'].replace('Input should', 'must', 1)}, got {error['input']!r}"


def dump_config(config: Section) -> str:
    """The whole config as YAML; `load_config` reads it back to an equal config."""
    text: str = OmegaConf.to_yaml(OmegaConf.create(escape_interpolations(config.model_dump(mode="json"))))
    return text


def escape_interpolations(value: Any) -> Any:
    """Escape `${` in text as `\\${` and double the backslashes before it, so that OmegaConf reads it literally."""
    return map_strings(value, partial(re.sub, r"(\\*)\$\{", r"\1\1\\${"))


def map_strings(value: Any, change: Callable[[str], Any]) -> Any:
    """Apply `change` to every string in nested values, but not to keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_strings(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(inner, change) for inner in value]
    return value


def describe_options(
    section: type[Section], *, prefix: str = "", needs: Sequence[tuple[str, Needs]] = ()
) -> Iterator[Knob]:
    """The knobs of a command's file or of a section, in the order of its class, nested sections expanded in place;
    `needs` are conditions on its knobs from outside."""
    for name, field in section.model_fields.items():
        inner, is_mapping = find_section(field.annotation)
        if inner is not None:
            of_inner = [(path.removeprefix(f"{name}."), need) for path, need in needs if path.startswith(f"{name}.")]
            for unused in field.metadata:
                if isinstance(unused, Unused) and unused.unless is not None:
                    of_inner += [(path, unused.unless) for path in unused.knobs]
            place = f"{prefix}{name}.<name>." if is_mapping else f"{prefix}{name}."
            yield from describe_options(inner, prefix=place, needs=of_inner)
        else:
            conditions = [*field.metadata, *(need for path, need in needs if path == name)]
            yield Knob(
                key=prefix + name,
                type=describe_type(field.annotation),
                default=describe_default(field),
                needs=", ".join(each.describe() for each in conditions if isinstance(each, Needs)),
                description=field.description or "",
            )


def find_section(annotation: Any) -> tuple[type[Section] | None, bool]:
    """The section class of a field, None if it has none, and whether the field maps names to sections."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, False
    if get_origin(annotation) is dict:
        return find_section(get_args(annotation)[1])[0], True
    if get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            inner, is_mapping = find_section(part)
            if inner is not None:
                return inner, is_mapping
    return None, False


def describe_type(annotation: Any) -> str:
    """A type as shown in help texts."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is Annotated:
        return describe_type(parts[0])
    if origin is Literal:
        return "|".join(str(part) for part in parts)
    if origin in (Union, UnionType):
        return "|".join(describe_type(part) for part in parts)
    if origin is tuple:
        inner = [describe_type(part) for part in parts if part is not Ellipsis]
        return f"list of {inner[0]}" if Ellipsis in parts else f"[{', '.join(inner)}]"
    if origin is dict:
        return f"mapping of {describe_type(parts[0])} to {describe_type(parts[1])}"
    return "any" if annotation is Any else annotation.__name__


def describe_default(field: FieldInfo) -> str:
    """A default value as YAML."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, tuple):
        value = list(value)
    text: str = yaml.safe_dump(value, default_flow_style=True)
    return text.removesuffix("...\n").strip()
