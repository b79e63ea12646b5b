"""Run files of Trinity-RFT with given keys, translated."""

from __future__ import annotations

from tunesmith.compat.trinity_yaml import translate_trinity_file
from tunesmith.config import RunConfig
from tunesmith.runs.load_config import build_section


def nest(key, value):
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def merge(one, other):
    merged = dict(one)
    for key, value in other.items():
        merged[key] = merge(merged[key], value) if isinstance(merged.get(key), dict) else value
    return merged


def translate(*pairs):
    """The run config translated from a file with these keys."""
    return build_section(RunConfig, translate_keys(*pairs).values)


def read_notes(*pairs):
    return translate_keys(*pairs).notes


def translate_keys(*pairs):
    values = {"buffer": {}, "model": {"model_path": "m"}}
    for key, value in pairs:
        values = merge(values, nest(key, value))
    return translate_trinity_file(values)
