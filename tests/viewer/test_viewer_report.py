"""A report is one file, bounded in size, whose data cannot run; rollouts in the terminal cannot control it."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner
from viewer_runs import HOSTILE, write_run

from tunesmith.cli import app, show_result
from tunesmith.errors import StorageError
from tunesmith.storage import clean_terminal
from tunesmith.viewer.answers.search import Filters
from tunesmith.viewer.command import print_step, view
from tunesmith.viewer.export import export_report
from tunesmith.viewer.reading.run import open_runs


def read_report(path):
    page = path.read_text(encoding="utf-8")
    return page, json.loads(
        re.search(r'<script type="application/json" id="report">(.*?)</script>', page, re.DOTALL)[1]
    )


def test_a_report_holds_its_answers_and_says_what_is_missing(run, tmp_path):
    line = export_report([run], tmp_path / "report.html", max_bytes=2**22)
    page, report = read_report(tmp_path / "report.html")
    assert "left out: searches" in line and report["left_out"][0].startswith("searches")
    wanted = {
        "runs",
        "evaluations",
        "config/0",
        "failures/0",
        "tasks/0",
        "step/0/4",
        "rollout/0/1/0/2",
        "selection/0/2",
    }
    assert wanted <= report["answers"].keys()
    assert "metric?name=rollout%2Freward_mean" in report["answers"]
    assert report["answers"]["answers?set=test&columns=0%3A0%2C0%3A4"]["num_rows"] == 3
    assert not re.search(r"(src|href)=.?(https?:|//)", page.replace("xmlns", "")), "nothing is loaded"


def test_data_cannot_end_the_scripts_of_a_report(run, tmp_path):
    export_report([run], tmp_path / "report.html", max_bytes=2**22)
    page, report = read_report(tmp_path / "report.html")
    assert HOSTILE in report["answers"]["rollout/0/1/0/0"]["response"]
    assert HOSTILE not in page and "<img" not in page
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert len(scripts) == 2 and all(f"'sha256-{each}'" in policy for each in hashes)


def test_a_report_keeps_to_its_size(tmp_path):
    (run,) = open_runs([write_run(tmp_path / "run", num_groups=40)])
    limit = 400_000
    line = export_report([run], tmp_path / "report.html", max_bytes=limit)
    assert (tmp_path / "report.html").stat().st_size <= limit
    assert "most groups with their rollouts: the limit" in line
    with pytest.raises(StorageError, match="raise --max-mb"):
        export_report([run], tmp_path / "small.html", max_bytes=1000)


def test_a_report_of_unlimited_size_leaves_nothing_out_for_it(tmp_path):
    root, out = write_run(tmp_path / "run", num_groups=40), tmp_path / "report.html"
    line = view(runs=[str(root)], port=0, export=str(out), max_mb=float("inf"))
    assert "the limit" not in line and out.stat().st_size > 400_000


def show(run, step=None, *, limit=10, **wanted):
    out = io.StringIO()
    print_step(run, step, Filters(**wanted), limit=limit, console=Console(file=out, width=200, highlight=False))
    return out.getvalue()


def test_show_prints_conversations_rewards_and_tracebacks(run):
    text = show(run, 2)
    assert "step 2" in text and "2 groups, 6 rollouts, mean reward 0.6, 1 failed" in text
    assert "-> calculate({" in text and "The answer is 3." in text
    assert "train/1  group 1 rollout 1  reward 1  advantage +0.5" in text
    assert "failed in judge: ValueError: no number in <script>" in text and "Traceback (most recent call last):" in text


def test_show_filters(run):
    assert "step 4" in show(run)
    assert show(run, failed := 1, status="failed").count("╭") == failed
    assert show(run, 1, min_reward=1.0).count("reward 1 ") == 3
    assert show(run, 1, task="train/1", max_reward=0.0).count("╭") == 1
    assert "no rollout of this step matches" in show(run, 1, task="none")
    assert "4 more match: raise --limit" in show(run, 1, limit=2)
    with pytest.raises(StorageError, match="it has steps 1 to 4"):
        show(run, 9)


def test_text_cannot_control_the_terminal():
    assert clean_terminal("a\x1b]0;title\x07\x9b31m\u202eb\tc\n") == "a\ufffd]0;title\ufffd\ufffd31m\ufffdb\tc\n"


def test_the_result_of_a_command_cannot_control_the_terminal(capsys):
    show_result("reply: \x1b[2J")
    assert capsys.readouterr().out == "reply: \ufffd[2J\n"


def test_the_commands_read_a_run_folder(run_folder, tmp_path):
    shown = CliRunner().invoke(app, ["show", str(run_folder), "--step", "3", "--limit", "1"])
    assert shown.exit_code == 0 and "5 more match" in shown.output
    exported = CliRunner().invoke(app, ["view", str(run_folder), "--export", str(tmp_path / "r.html"), "--max-mb", "4"])
    assert exported.exit_code == 0 and (tmp_path / "r.html").is_file()
    (tmp_path / "pipeline" / "a").mkdir(parents=True)
    (tmp_path / "pipeline" / "a" / "metrics.jsonl").write_text("")  # fine-tuning, without rollouts
    (tmp_path / "pipeline" / "rl").symlink_to(run_folder)
    above = CliRunner().invoke(app, ["show", str(tmp_path / "pipeline"), "--step", "3", "--limit", "1"])
    assert above.exit_code == 0 and "5 more match" in above.output
    missing = CliRunner().invoke(app, ["view", str(tmp_path / "none"), "--export", str(tmp_path / "none.html")])
    assert missing.exit_code == 1 and "there is no such folder" in missing.output
