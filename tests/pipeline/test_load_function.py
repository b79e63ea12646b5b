"""Workflows and judges by path."""

from __future__ import annotations

import pytest

from tunesmith.errors import ConfigError
from tunesmith.pipeline.load_function import load_function


def test_a_function_loads_from_a_file_and_its_neighbours_can_be_imported(tmp_path):
    (tmp_path / "neighbour_of_flow.py").write_text("VALUE = 7\n")
    (tmp_path / "flow.py").write_text("from neighbour_of_flow import VALUE\ndef run():\n    return VALUE\n")
    assert load_function(f"{tmp_path}/flow.py:run", knob="workflow")() == 7


def test_a_function_loads_from_a_module():
    assert load_function("json:dumps", knob="judge")([1]) == "[1]"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("flow", "module:function"),
        ("nowhere.py:run", "no file 'nowhere.py'"),
        ("no_such_module:run", "no module 'no_such_module'"),
        ("json:no_such_function", "no function 'no_such_function'"),
    ],
)
def test_what_is_not_there_is_named(spec, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_function(spec, knob="workflow")
    assert "workflow" in str(caught.value)
