"""bm25s is imported without JAX, which would reserve the memory of a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("bm25s", reason="needs the extra retrieval")

FAKE_JAX = "from pathlib import Path\nPath(__file__).with_name('imported').touch()\n"


def test_importing_bm25s_does_not_import_jax(tmp_path: Path) -> None:
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text(FAKE_JAX)
    (tmp_path / "jax" / "lax.py").write_text("def top_k(values, k): return values, values\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from pathlib import Path\n"
        "from tunesmith.retrieval.index.bm25 import import_bm25s\n"
        "import_bm25s()\n"
        "assert 'jax' not in sys.modules\n"
        f"assert not Path({str(tmp_path)!r}, 'jax', 'imported').exists()\n"
        "import jax\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "jax" / "imported").exists(), "a program's own import of jax still works"
