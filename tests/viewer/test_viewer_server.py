"""The server answers this machine only, changes nothing and sends data that cannot run."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import httpx
import pytest
from starlette.testclient import TestClient
from viewer_runs import HOSTILE

from tunesmith.errors import StorageError
from tunesmith.viewer.answers.table import Answers
from tunesmith.viewer.bundle import STATIC
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


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_written(client, method):
    assert client.request(method, "/api/runs").status_code == 405


def test_wrong_requests_are_one_sentence(client):
    assert client.get("/api/step/0/77").status_code == 400
    assert "no rollouts of step 77" in client.get("/api/step/0/77").text
    assert client.get("/api/nothing").status_code == 404
    assert client.get("/api/search/0", params={"min_reward": "x"}).text == "min_reward must be a number, got 'x'"
    assert client.get("/api/metric").status_code == 404


def test_the_server_answers_this_machine_only(run):
    command = [sys.executable, "-m", "tunesmith", "view", str(run.root), "--port", "0", "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())[0]
        assert httpx.get(f"{url}/api/runs").status_code == 200
        for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            refused = httpx.get(f"{url}/api/runs", headers=headers)
            assert refused.status_code == 403 and "sums" not in refused.text
        port = url.rpartition(":")[2]
        failed = subprocess.run(
            [*command[:5], "--port", port, "--no-browser"], capture_output=True, text=True, check=False
        )
        assert failed.returncode == 1 and "set --port to a free port" in failed.stderr
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(30) in (0, 130, -signal.SIGINT)


def test_the_page_never_turns_data_into_markup():
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        forbidden = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|dangerouslySetInnerHTML|document\.write|\beval\(", text
        )
        assert not forbidden, f"{path.name}: {forbidden}"


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
