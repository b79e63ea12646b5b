"""Looking up functions by name, and validating arguments against signatures."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import Field

from tunesmith.arguments import bind_arguments, find_function, suggest_name
from tunesmith.errors import ConfigError


def scale(value, *, factor: Annotated[float, Field(gt=0)], offset: float = 0.0):
    return value * factor + offset


class Scale:
    def __init__(self, *, factor: float):
        self.factor = factor


class Power:
    def __call__(self, value, *, power: int = 1):
        return value**power


def test_arguments_are_bound_to_functions_classes_and_callables():
    assert bind_arguments(scale, {"factor": 2}, where="scale")(3) == 6
    assert bind_arguments(Scale, {"factor": 2.5}, where="scale")().factor == 2.5
    assert bind_arguments(Power(), {"power": 2}, where="power")(3) == 9


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"factr": 1.0}, "unknown argument 'factr' in scale: did you mean 'factor'"),
        ({"factor": "2"}, "factor='2' in scale: Input should be a valid number"),
        ({"factor": -1.0}, "factor=-1.0 in scale: Input should be greater than 0"),
        ({"offset": 1.0}, "scale needs the argument 'factor'"),
        ({"factor": 1.0, "value": 2}, "unknown argument 'value'"),
        ({"factor": 1.0, "offset": float("nan")}, "offset=nan in scale: NaN is not a number"),
    ],
)
def test_arguments_that_do_not_match_the_signature_are_named(args, message):
    with pytest.raises(ConfigError, match=message):
        bind_arguments(scale, args, where="scale")


def test_reserved_arguments_cannot_be_set():
    with pytest.raises(ConfigError, match="unknown argument 'offset'"):
        bind_arguments(scale, {"factor": 1.0, "offset": 1.0}, where="scale", reserved=["offset"])


def test_an_annotation_that_cannot_be_resolved_is_named():
    def broken(*, size: Nowhere):  # noqa: F821
        return size

    with pytest.raises(ConfigError, match="broken: a type annotation cannot be resolved"):
        bind_arguments(broken, {"size": 1}, where="broken")


def test_objects_without_a_signature_are_refused():
    for thing in (42, dict):
        with pytest.raises(ConfigError, match="is not a user-defined function or class"):
            bind_arguments(thing, {}, where="thing")


def test_names_come_from_the_table_or_are_loaded():
    assert find_function("scale", {"scale": scale}, load={}.__getitem__, where="operator") is scale
    assert find_function("m:Scale", {}, load={"m:Scale": Scale}.__getitem__, where="operator") is Scale
    with pytest.raises(ConfigError, match="unknown operator 'scal': did you mean 'scale'"):
        find_function("scal", {"scale": scale}, load={}.__getitem__, where="operator")


def test_the_nearest_name_is_suggested_or_all_are_listed():
    assert suggest_name("alpa", ["alpha", "beta"]) == "did you mean 'alpha'?"
    assert suggest_name("zzz", ["alpha", "beta"]) == "known: alpha, beta"
    assert suggest_name("zzz", []) == "it takes none"
