"""The longest test files are started first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from file_order import STARTED_FIRST, put_long_files_first


@pytest.mark.parametrize("path", STARTED_FIRST)
def test_long_files_exist_and_come_first(path):
    assert (Path(__file__).parents[2] / path).is_file()
    items = [SimpleNamespace(path=Path(each)) for each in ("tests/test_types.py", path, "tests/test_storage.py")]
    put_long_files_first(items)
    names = [item.path.name for item in items]
    assert names == [Path(path).name, "test_types.py", "test_storage.py"]
