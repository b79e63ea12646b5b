"""Checks a model's arguments against the JSON schema of a tool.

An error that the model made is a sentence that it reads, not a failure of the rollout. A schema is read in the dialect
that its `$schema` names, by default 2020-12; `nullable`, and limits that `true` makes exclusive, mean what they do in
OpenAPI 3.0. 3.0 is no integer: a function with an `int` parameter would receive a float. `format` is not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jsonschema import Draft4Validator, Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match
from jsonschema.validators import extend, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, specification_with

EXCLUSIVE = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
CLAUSES: Mapping[str, str] = {
    "const": "be {}",
    "minimum": "be at least {}",
    "maximum": "be at most {}",
    "exclusiveMinimum": "be more than {}",
    "exclusiveMaximum": "be less than {}",
    "minLength": "have at least {} characters",
    "maxLength": "have at most {} characters",
    "minItems": "have at least {} items",
    "maxItems": "have at most {} items",
}
"""What a value must do, by keyword; others have the library's message."""
MAX_MESSAGE_CHARS = 300
Check = Callable[[Any, Any, Any, Any], Iterable[ValidationError] | None]


class ArgumentChecker:
    """The schema of a tool's arguments, ready to check calls; ValueError if it is not a valid schema."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        standard = validator_for(parameters, default=Draft202012Validator)
        check_schema(parameters, standard)
        adapted = extend(
            standard, validators=adapt_checks(standard.VALIDATORS), type_checker=Draft4Validator.TYPE_CHECKER
        )
        self._validator = adapted(parameters, registry=Registry())
        self._names = tuple(parameters.get("properties", ()))
        self._required = tuple(parameters.get("required", ()))

    def find_wrong(self, arguments: Mapping[str, Any]) -> str | None:
        """What is wrong with the arguments: one that is missing, unknown, or of another type or value."""
        for name in self._required:
            if name not in arguments:
                return f"the argument {name!r} is missing; the arguments are {', '.join(self._names)}"
        for name in arguments:
            if name not in self._names:
                return f"there is no argument {name[:60]!r}; the arguments are {', '.join(self._names)}"
        try:
            error = next(self._validator.iter_errors(arguments), None)
            return None if error is None else describe(best_match([error]))
        except RecursionError:
            return "the arguments are nested too deeply"
        except (ArithmeticError, ValueError) as error:  # multipleOf of an infinite number, or of NaN
            return f"the arguments have a number that cannot be checked: {error}"


def check_schema(parameters: Mapping[str, Any], standard: Any) -> None:
    """Raise ValueError for keywords with wrong values, and for references to nothing."""
    for error in standard(standard.META_SCHEMA, format_checker=standard.FORMAT_CHECKER).iter_errors(parameters):
        keyword = error.absolute_path[-1] if error.absolute_path else ""
        if not (keyword in EXCLUSIVE and isinstance(error.instance, bool)):
            place = "/".join(map(str, error.absolute_path))
            raise ValueError(f"{place or 'the schema'}: {error.message[:MAX_MESSAGE_CHARS]}")
    specification = specification_with(standard.META_SCHEMA.get("$schema", ""), default=DRAFT202012)
    root = specification.create_resource(parameters)
    waiting, seen = [(Registry().resolver_with_root(root), root)], set()
    while waiting:
        resolver, resource = waiting.pop()
        if id(resource.contents) in seen or not isinstance(resource.contents, Mapping):
            continue
        seen.add(id(resource.contents))
        waiting += [(resolver.in_subresource(each), each) for each in resource.subresources()]
        if "$ref" in resource.contents:
            try:
                found = resolver.lookup(resource.contents["$ref"])
            except Unresolvable as error:
                raise ValueError(f"$ref {resource.contents['$ref']!r} names no part of the schema") from error
            waiting.append((found.resolver, specification.create_resource(found.contents)))


def adapt_checks(standard: Mapping[str, Check]) -> dict[str, Check]:
    """The checks of keywords that mean more in OpenAPI 3.0."""

    def allow_null(keyword: str) -> Check:
        def check(validator: Any, expected: Any, value: Any, schema: Any) -> Iterable[ValidationError] | None:
            is_allowed = value is None and schema.get("nullable") is True
            return None if is_allowed else standard[keyword](validator, expected, value, schema)

        return check

    def read_boolean(keyword: str) -> Check:
        def check(validator: Any, limit: Any, value: Any, schema: Any) -> Iterable[ValidationError] | None:
            if isinstance(limit, bool):
                limit = schema.get(EXCLUSIVE[keyword]) if limit else None
            return None if limit is None else standard[keyword](validator, limit, value, schema)

        return check

    adapted = {keyword: allow_null(keyword) for keyword in ("type", "enum")}
    return adapted | {keyword: read_boolean(keyword) for keyword in EXCLUSIVE if keyword in standard}


def describe(error: ValidationError) -> str:
    """A sentence that names the argument, as in "the argument 'order'['parts'][0] must be of type string"."""
    first, *rest = error.absolute_path or ("",)
    name = f"the argument {first!r}" + "".join(f"[{shorten(each)}]" for each in rest) if first else "the arguments"
    if error.validator == "required":
        missing = next(each for each in error.validator_value if each not in error.instance)
        return f"{name} has no {missing!r}"
    clauses = list_clauses(list_alternatives(error))
    return f"{name} must {' or '.join(clauses)}" if clauses else f"{name}: {error.message[:MAX_MESSAGE_CHARS]}"


def shorten(key: Any) -> str:
    return repr(key[:60] if isinstance(key, str) else key)


def list_alternatives(error: ValidationError) -> list[ValidationError]:
    """What is wrong in each alternative of a value; the error itself if there are none, or it is inside the value."""
    if error.validator not in ("anyOf", "oneOf") or any(each.path for each in error.context):
        return [error]
    return [leaf for each in error.context for leaf in list_alternatives(each)]


def list_clauses(errors: Iterable[ValidationError]) -> list[str]:
    """What the value must do, an alternative for each error; none if one of them cannot be said in this form."""
    clauses: list[str] = []
    types: dict[str, None] = {}
    for error in errors:
        wanted = error.validator_value
        if error.validator == "type":
            types |= dict.fromkeys([wanted] if isinstance(wanted, str) else wanted)
        elif error.validator == "enum":
            clauses.append(f"be one of {', '.join(map(str, wanted))}")
        elif error.validator in CLAUSES:
            limit = (
                error.schema[EXCLUSIVE[error.validator]] if wanted is True and error.validator != "const" else wanted
            )
            clauses.append(CLAUSES[error.validator].format(limit))
        else:
            return []
    return [*clauses, *([f"be of type {' or '.join(types)}"] if types else [])]
