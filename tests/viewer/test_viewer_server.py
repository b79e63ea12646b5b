"""The server answers this machine only, changes nothing and sends data that cannot run."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

import httpx
import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner
from viewer_runs import HOSTILE, write_run

from tunesmith.cli import app
from tunesmith.errors import ConfigError, StorageError
from tunesmith.viewer.answers.table import Answers
from tunesmith.viewer.bundle import STATIC
from tunesmith.viewer.command import view
from tunesmith.viewer.reading.run import open_runs
from tunesmith.viewer.server import build_app

MODULES = sorted(STATIC.glob("*.js"))


@pytest.fixture
def client(run):
    return TestClient(build_app(Answers([run])), base_url="http://127.0.0.1:7860")


def test_the_page_and_its_files_are_served(client):
    page = client.get("/")
    assert page.status_code == 200 and 'src="bundle.js"' in page.text
    for name, kind in (
        ("bundle.js", "text/javascript"),
        ("style.css", "text/css"),
        ("vendor/uplot.js", "text/javascript"),
    ):
        assert client.get(f"/{name}").headers["content-type"].startswith(kind)


def test_answers_are_json(client):
    answer = client.get("/api/runs")
    assert answer.headers["content-type"] == "application/json"
    (described,) = answer.json()["runs"]
    assert (described["name"], described["state"], described["steps"]) == ("sums", "finished", [[1, 4]])
    assert client.get("/api/metric", params={"name": "rollout/reward_mean"}).json()["series"][0]["values"][0] == 0.1
    assert HOSTILE in client.get("/api/rollout/0/1/0/0").json()["response"]


def test_every_response_has_the_security_headers(client):
    for path in ("/", "/bundle.js", "/api/runs", "/api/none", "/none.js"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "path", ["/../server.py", "/%2e%2e/server.py", "/..%2fserver.py", "/vendor/../../server.py", "//etc/passwd"]
)
def test_files_outside_of_the_page_are_not_served(client, path):
    answer = client.get(path)
    assert answer.status_code == 404 and "import" not in answer.text


def test_notes_are_all_that_can_be_written(client, run):
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.request(method, "/api/runs").status_code == 405
    notes = {"note": f"a longer run\n{HOSTILE}", "tags": ["baseline", "seed 1"]}
    assert client.put("/api/notes/0", json=notes).json() == notes
    try:
        (described,) = client.get("/api/runs").json()["runs"]
        assert described == described | notes and json.loads(run.paths.notes.read_text()) == notes
        for wrong in ({"note": 1, "tags": []}, {"note": "", "tags": "x"}, {"note": ""}):
            refused = client.put("/api/notes/0", json=wrong)
            assert refused.status_code == 400 and "`tags`, a list of texts" in refused.text
        too_long = client.put("/api/notes/0", json={"note": "x" * 2**17, "tags": []})
        assert too_long.status_code == 400 and "at most 65536 bytes" in too_long.text
        assert client.put("/api/notes/1", json=notes).status_code == 404
    finally:
        run.paths.notes.unlink()


def test_wrong_requests_are_one_sentence(client):
    assert client.get("/api/step/0/77").status_code == 400
    assert "no rollouts of step 77" in client.get("/api/step/0/77").text
    assert client.get("/api/nothing").status_code == 404
    assert client.get("/api/search/0", params={"min_reward": "x"}).text == "min_reward must be a number, got 'x'"
    assert client.get("/api/metric").status_code == 404


def test_the_server_answers_this_machine_only_and_shows_runs_that_start_later(tmp_path):
    folder = str(tmp_path / "runs")
    write_run(tmp_path / "runs" / "first", num_groups=1)
    command = [sys.executable, "-m", "tunesmith", "view", folder, "--port", "0", "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        announced = server.stdout.readline()
        assert announced.startswith("first: ")
        url = re.search(r"http://127\.0\.0\.1:\d+", announced)[0]
        with httpx.Client(base_url=f"{url}/api/") as client:
            assert len(client.get("versions").json()["versions"]) == 1
            write_run(tmp_path / "runs" / "sums", num_groups=1)
            assert len(client.get("versions").json()["versions"]) == 2
            assert client.get("runs").json()["runs"][1]["name"] == "sums"
            foreign = {"Host": "evil.example", "Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
            for headers in ({name: value} for name, value in foreign.items()):
                refused = client.get("runs", headers=headers)
                assert refused.status_code == 403 and "sums" not in refused.text
                written = client.put("notes/0", headers=headers, json={"note": "evil", "tags": []})
                assert written.status_code == 403 and not (tmp_path / "runs/sums/notes.json").exists()
        with pytest.raises(ConfigError, match="set --port to a free port"):
            view(runs=[folder], port=int(url.rpartition(":")[2]), no_browser=True, max_mb=20.0)
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(30) in (0, 130, -signal.SIGINT)


def test_a_path_without_a_run_ends_the_command_with_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = write_run(tmp_path / "run", num_groups=1)
    (tmp_path / "empty").mkdir()
    for name, reason in (("none", "there is no such folder"), ("empty", "it has no metrics.jsonl or comparison.json")):
        for options in (["--no-browser", "--port", "0"], ["--export", "report.html"]):
            ended = CliRunner().invoke(app, ["view", str(root), name, *options])
            message = ended.stderr
            assert ended.exit_code == 1 and message.startswith(
                f"tunesmith: {tmp_path / name} is not the folder of a run: {reason}"
            )
            assert message.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_the_page_never_turns_data_into_markup():
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        forbidden = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|dangerouslySetInnerHTML|document\.write|\beval\(", text
        )
        assert not forbidden, f"{path.name}: {forbidden}"


def parse_themes():
    """Theme -> name of a color -> its red, green and blue from 0 to 1."""
    blocks = re.findall(r":root[^{]*\{([^}]*)\}", (STATIC / "style.css").read_text())
    colors = [dict(re.findall(r"--([\w-]+): #([0-9a-f]{6});", block)) for block in blocks]
    return [{name: [part / 255 for part in bytes.fromhex(text)] for name, text in block.items()} for block in colors]


def compute_luminance(color):
    """Relative luminance as WCAG 2 defines it."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_stands_out_from_its_background(theme):
    colors = parse_themes()[theme]
    pairs = [(text, ground) for text in ("text", "dim") for ground in ("bg", "panel", "sampled", "hover")]
    pairs += [("text", "ins"), ("text", "del")]
    pairs += [(text, ground) for text in ("accent", "error", "good") for ground in ("bg", "panel", "hover")]
    for text, ground in [*pairs, ("on-accent", "accent")]:
        low, high = sorted(compute_luminance(colors[name]) for name in (text, ground))
        assert (high + 0.05) / (low + 0.05) >= 4.5, f"{text} on {ground}"


def test_modules_are_small_and_import_files_that_exist():
    assert len(MODULES) > 10
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") < 250, path.name
        for name in re.findall(r'from "\./([^"]+)"', text):
            assert (STATIC / name).is_file(), f"{path.name} imports {name}"


def test_vendored_files_have_a_version_and_a_licence():
    listed = (STATIC / "vendor" / "LICENSES.md").read_text(encoding="utf-8")
    for path in (STATIC / "vendor").iterdir():
        assert path.name == "LICENSES.md" or path.name in listed, path.name
    assert "Apache License" in listed and listed.count("The MIT License") == 2


def test_what_the_first_page_needs_is_read_in_advance(run, tmp_path):
    Answers([run]).preload()
    assert run.metrics.last_step == 4
    (tmp_path / "metrics.jsonl").write_text("damaged\n")
    answers = Answers(open_runs([tmp_path]))
    answers.preload()
    with pytest.raises(StorageError):
        answers.get_json("runs", {})
