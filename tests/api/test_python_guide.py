"""The snippets of docs/python.md run in order, as printed."""

from __future__ import annotations

import re
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "python.md"


def test_the_snippets_of_the_guide_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = GUIDE.read_text()
    namespace: dict[str, object] = {"__name__": "guide"}
    for match in re.finditer(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        line = text[: match.start(1)].count("\n")
        code = compile("\n" * line + match[1], str(GUIDE), "exec")  # errors name the line of the guide
        exec(code, namespace)
    shown = capsys.readouterr().out
    assert "TuneResult\n  folder" in shown
    assert "MetricTable: steps 1 to 3" in shown
    assert "base -> rl" in shown or "failed rollouts" in shown
    assert "adapter" in shown
