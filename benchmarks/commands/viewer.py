"""Time to the first page and memory of `tunesmith view`, for runs of 1,000 to 1,000,000 trajectories.

The run folders are written by the store that `tunesmith tune` uses: 256 trajectories a step, two turns each, merged
into files of 100 steps. Times are measured from the start of the process and from the first request, in headless
Chromium until the first curve is drawn; then a step, a search on numbers (which builds the index) and a search for text
that occurs nowhere (which reads every reply) are timed over HTTP. Caches of the file system are warm.

python -m benchmarks.commands.viewer --sizes 1000 100000 1000000 --out results/commands/viewer.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import pyarrow

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "viewer"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from viewer_runs import TOKENIZER, build_tool_turns

from chromium import Chromium, find_chromium
from tunesmith.experience.store import merge_rollouts, save_rollouts
from tunesmith.storage import DONE, RunPaths, encode_json_line, save_json, save_text
from tunesmith.types import Group, Task, Trajectory

GROUP_SIZE, NUM_GROUPS, STEPS_PER_FILE, NUM_DISTINCT, NUM_METRICS = 8, 32, 100, 16, 100
TEXT_LIMIT_S, NUM_PAGES = 15.0, 7


def write_run(root: Path, num_trajectories: int) -> None:
    """A run of as many trajectories; the contents of its steps repeat after `NUM_DISTINCT`."""
    paths, num_steps = RunPaths(root), -(-num_trajectories // (GROUP_SIZE * NUM_GROUPS))
    paths.checkpoint(num_steps).mkdir(parents=True)
    TOKENIZER.save_pretrained(paths.checkpoint(num_steps))
    save_json(paths.checkpoint(num_steps) / DONE, {"step": num_steps})
    save_text(paths.config, f"name: {root.name}\ntotal_steps: {num_steps}\nalgorithm: {{algorithm_type: grpo}}\n")
    with paths.metrics.open("wb") as file:
        for step in range(1, num_steps + 1):
            names = {f"train/metric_{number:02d}": step / (number + 1) for number in range(NUM_METRICS)}
            names["rollout/reward_mean"] = step / num_steps
            file.write(encode_json_line({"step": step, "kind": "train"} | names))
    with tempfile.TemporaryDirectory() as folder:
        sources = []
        for number in range(min(NUM_DISTINCT, num_steps)):
            sources.append(Path(folder) / f"step_{number + 1:06d}.parquet")
            save_rollouts(sources[-1], *build_step(number))
        for first in range(1, num_steps + 1, STEPS_PER_FILE):
            steps = range(first, min(first + STEPS_PER_FILE, num_steps + 1))
            target = paths.rollouts(0).parent / f"steps_{steps[0]:06d}-{steps[-1]:06d}.parquet"
            merge_rollouts(target, {step: sources[step % len(sources)] for step in steps})


def build_step(number: int) -> tuple[list[Group], list[list[float]]]:
    groups = []
    for index in range(NUM_GROUPS):
        question = (
            f"{index} apples and {number} pears cost {index * 7 + number} dollars. What do {index + 3} apples cost?"
        )
        task = Task(
            task_id=f"train/{number * NUM_GROUPS + index}", index=index, row={"question": question * 2, "answer": "3"}
        )
        runs = tuple(
            Trajectory(
                task=task,
                run_index=run,
                turns=build_tool_turns(question, f"{run * 13 + index} dollars, because of {number}", version=number),
                reward=float(run % 2),
                response_text=f"The answer is {run * 13 + index} dollars, because of {number}.",
            )
            for run in range(GROUP_SIZE)
        )
        groups.append(Group(task=task, trajectories=runs))
    return groups, [[run % 2 - 0.5 for run in range(GROUP_SIZE)] for _ in groups]


def measure(root: Path) -> dict[str, Any]:
    """Times and memory of one server."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "tunesmith", "view", str(root), "--no-browser", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = next(word for word in process.stdout.readline().split() if word.startswith("http"))
        found: dict[str, Any] = {"start_s": time.perf_counter() - started, "start_cpu_s": read_cpu(process.pid)}
        if find_chromium() is not None:
            with tempfile.TemporaryDirectory() as profile, Chromium(Path(profile)) as browser:
                browser.call("Network.setCacheDisabled", cacheDisabled=True)
                times = [time_page(browser, url) for _ in range(NUM_PAGES)]
                found |= {"first_page_s": times[0], "best_page_s": min(times)}
            found["cpu_per_page_s"] = (read_cpu(process.pid) - found["start_cpu_s"]) / NUM_PAGES
        else:
            found["first_page_requests_s"] = time_first_requests(url)
        found["rss_first_page_mib"] = read_rss(process.pid)
        with httpx.Client(base_url=f"{url}api/", timeout=600) as client:
            run = client.get("runs").json()["runs"][0]
            last_step = run["steps"][-1][-1]
            found["step_s"], _ = time_get(client, f"step/0/{last_step}")
            found["rollout_s"], _ = time_get(client, f"rollout/0/{last_step}/3/2")
            cpu_s = read_cpu(process.pid)
            found["search_numbers_s"] = search(client, {"min_reward": "0.5", "sort": "longest"})
            found["search_numbers_cpu_s"] = read_cpu(process.pid) - cpu_s
            found["rss_indexed_mib"] = read_rss(process.pid)
            found["failures_s"], _ = time_get(client, "failures/0")
            found["text_rollouts_per_s"] = measure_text_search(client)
        found["rss_end_mib"] = read_rss(process.pid)
    finally:
        process.terminate()
        process.wait()
    return found


def time_page(browser: Chromium, url: str) -> float:
    """Seconds until the first curve is drawn."""
    browser.open("about:blank")
    started = time.perf_counter()
    browser.call("Page.navigate", url=url)
    browser.wait("document.querySelector('.chart canvas')")
    return time.perf_counter() - started


def time_first_requests(url: str) -> float:
    """Seconds of the requests of the first page, one after the other, for machines without a browser."""
    started = time.perf_counter()
    with httpx.Client(base_url=url, timeout=600) as client:
        for path in ("", "bundle.js", "vendor/uplot.js", "style.css", "api/versions", "api/runs"):
            client.get(path).raise_for_status()
        client.get("api/metric", params={"name": "rollout/reward_mean"}).raise_for_status()
    return time.perf_counter() - started


def time_get(client: httpx.Client, path: str, **params: str) -> tuple[float, Any]:
    started = time.perf_counter()
    answer = client.get(path, params=params)
    answer.raise_for_status()
    return time.perf_counter() - started, answer.json()


def search(client: httpx.Client, params: dict[str, str]) -> float:
    """Seconds until the first matches."""
    started, cursor = time.perf_counter(), 0
    while True:
        answer = time_get(client, "search/0", **params, cursor=str(cursor))[1]
        cursor = answer["cursor"]
        if answer["matches"] or cursor is None:
            return time.perf_counter() - started


def measure_text_search(client: httpx.Client) -> float:
    """Rollouts searched per second for a text that occurs nowhere, within `TEXT_LIMIT_S`."""
    started, cursor = time.perf_counter(), 0
    while time.perf_counter() - started < TEXT_LIMIT_S:
        answer = time_get(client, "search/0", text="no reply has this", cursor=str(cursor))[1]
        if answer["cursor"] is None:
            return float(answer["num_candidates"]) / (time.perf_counter() - started)
        cursor = answer["cursor"]
    return cursor / (time.perf_counter() - started)


def read_cpu(pid: int) -> float:
    """Processor seconds of a process; they do not depend on what else runs on the machine."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def read_rss(pid: int) -> float:
    """Resident memory of a process in MiB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 100_000, 1_000_000])
    parser.add_argument("--folder", default=None, help="keep the run folders here")
    parser.add_argument("--out", default="results/commands/viewer.json")
    options = parser.parse_args()
    folder = Path(options.folder or tempfile.mkdtemp())
    rows = []
    for size in options.sizes:
        root = folder / f"run_{size}"
        if not root.exists():
            write_run(root, size)
        rollouts = sum(path.stat().st_size for path in (root / "rollouts").iterdir()) / 2**20
        rows.append({"num_trajectories": size, "rollouts_mib": rollouts, **measure(root)})
        print(json.dumps(rows[-1]), flush=True)
    versions = {"python": platform.python_version(), "pyarrow": pyarrow.__version__, "machine": platform.machine()}
    Path(options.out).write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    if options.folder is None:
        shutil.rmtree(folder)
    print("\n" + "  ".join(f"{name:>18}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value:18.2f}" if isinstance(value, float) else f"{value:18d}" for value in row.values()))


if __name__ == "__main__":
    main()
