"""Every page of `tunesmith view`: pictures for the docs, what axe-core finds, and whether a phone scrolls sideways.

The runs are one of `tunesmith demo` and two of `tunesmith tune` on its agent and its fine-tuned model (seeds 0 and 1),
which take ten minutes on two cores; folders of runs may be given instead. The pages of the run of the tests, which has
failures, a selector and hostile text, are checked too. Each page is opened in headless Chromium in light, in dark, and
390 pixels wide, and checked by axe-core (WCAG 2.2 A and AA, and best practices), which is not part of Tunesmith. The
exit status is 1 if it finds something serious or critical, or if a page scrolls sideways.

npm install --prefix /tmp/axe axe-core
python -m benchmarks.commands.viewer_pages --axe /tmp/axe/node_modules/axe-core/axe.min.js --images docs/images \\
    --out results/commands/viewer_pages.json
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "viewer"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from viewer_runs import write_run

from chromium import Chromium

WIDTH, HEIGHT, PHONE = 1280, 800, 390
AGENT = "tunesmith.commands.demo.agent"
IMPACTS = ("serious", "critical")
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
LOADED = (
    "document.querySelector('main') && "
    "![...document.querySelectorAll('.note')].some((note) => note.innerText === 'Loading')"
)
PAGES: Mapping[str, str] = {
    "curves": "#/",
    "curves_log": "#/?metric=train/&x=time&y=log&smooth=0.6",
    "run": "#/run/{run}?key=algorithm",
    "step": "#/step/{run}/{last}",
    "group": "#/group/{run}/{first}/{group}",
    "trie": "#/group/{run}/{first}/{group}?view=trie",
    "rollout": "#/rollout/{run}/{first}/{group}/{best}",
    "tokens": "#/rollout/{run}/{first}/{group}/{worst}?view=tokens",
    "failed": "#/rollout/{run}/{first}/0/2",
    "search": "#/search/{run}?tool=*&sort=longest",
    "tasks": "#/task/{run}",
    "task": "#/task/{run}?id={task}&before={run}/{first}/{group}/{worst}&after={run}/{first}/{group}/{best}",
    "failures": "#/failures/{run}",
    "selector": "#/selector/{run}",
    "evaluations": "#/evaluations?show=differ",
}
PICTURES = {
    ("curves", "light", WIDTH),
    ("run", "light", WIDTH),
    ("step", "light", WIDTH),
    ("step", "light", PHONE),
    ("rollout", "light", WIDTH),
    ("tokens", "light", WIDTH),
    ("trie", "dark", WIDTH),
    ("task", "light", WIDTH),
    ("evaluations", "light", WIDTH),
}
"""What the docs show: page, theme and width."""
LOOKS = (("light", WIDTH), ("dark", WIDTH), ("light", PHONE))
NOTE = {"note": "The same model and tasks, another seed.", "tags": ["seed 1"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", help="folders with runs")
    parser.add_argument("--axe", type=Path, help="axe.min.js; without it only widths are checked")
    parser.add_argument("--out", type=Path, help="file for what was found")
    parser.add_argument("--images", type=Path, help="folder for the pictures")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, Chromium(Path(name) / "profile", width=WIDTH, height=HEIGHT) as browser:
        folder = Path(name)
        checker = args.axe.read_text(encoding="utf-8") if args.axe is not None else None
        hostile = str(write_run(folder / "hostile"))
        found: dict[str, Any] = {}
        for runs, images in (([hostile], None), (args.runs or make_runs(folder), args.images)):
            with serve(runs) as url:
                found["hostile" if runs == [hostile] else "real"] = check_pages(browser, url, checker, images)
    print(json.dumps(found, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    if any(each["num_serious"] or each["pages_that_scroll_sideways"] for each in found.values()):
        sys.exit(1)


def make_runs(folder: Path) -> list[str]:
    """The demo, and its reinforcement learning twice with evaluations on the way."""
    call("demo", "--out", str(folder / "demo"))
    (config,) = folder.glob("demo/*/rl/config.yaml")
    for seed in (0, 1):
        functions = ("--workflow", f"{AGENT}:solve_problem", "--judge", f"{AGENT}:judge_answer")
        changes = {"checkpoint_root_dir": folder, "project": "calculator", "name": f"seed-{seed}", "seed": seed}
        changes |= {"total_steps": 30, "evaluation.at_start": True, "evaluation.interval_steps": 10}
        settings = [f"--set={key}={value}" for key, value in changes.items()]
        call("tune", str(config), *functions, *settings)
    return [str(folder / "calculator")]


def call(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "tunesmith", *arguments], check=True)


@contextmanager
def serve(runs: list[str]) -> Iterator[str]:
    """The address of `tunesmith view`."""
    command = [sys.executable, "-m", "tunesmith", "view", *runs, "--port", "0", "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield next(word for word in process.stdout.readline().split() if word.startswith("http"))
    finally:
        process.terminate()
        process.wait()


def check_pages(browser: Chromium, url: str, checker: str | None, images: Path | None) -> dict[str, Any]:
    places = find_places(browser, url)
    found: list[dict[str, Any]] = []
    wide: list[str] = []
    version = None
    for name, address in PAGES.items():
        for theme, width in LOOKS:
            open_page(browser, url + address.format(**places), theme, width)
            if images is not None and (name, theme, width) in PICTURES:
                save_picture(browser, images / f"viewer_{'phone' if width == PHONE else name}.png", width)
            if browser.evaluate("document.documentElement.scrollWidth") > width:
                wide.append(f"{name}, {width} pixels")
            if checker is not None:
                version, broken = run_axe(browser, checker)
                found += [{"page": name, "theme": theme, "width": width} | each for each in broken]
    errors, browser.errors = browser.errors, []
    browser.open("about:blank")  # a page whose server has ended would ask on
    num_serious = sum(each["impact"] in IMPACTS for each in found)
    return {
        "axe_core": version,
        "num_pages": len(PAGES),
        "num_serious": num_serious,
        "num_others": len(found) - num_serious,
        "pages_that_scroll_sideways": wide,
        "errors_in_the_console": errors,
        "findings": found,
    }


def find_places(browser: Chromium, url: str) -> dict[str, Any]:
    """The last run with rollouts, which gets a note, its first and last step, and the group of the first step whose
    rewards differ most, with a best and a worst rollout of it."""
    browser.open(url)
    browser.wait("document.querySelector('.chart canvas')")

    def get(path: str, **options: Any) -> Any:
        return browser.evaluate(f"fetch('api/{path}', {json.dumps(options)}).then((response) => response.json())")

    run = next(each for each in reversed(get("runs")["runs"]) if each["steps"])
    get(f"notes/{run['id']}", method="PUT", body=json.dumps(NOTE))
    first, last = run["steps"][0][0], run["steps"][-1][-1]
    group = max(get(f"step/{run['id']}/{first}")["groups"], key=lambda each: each["std"] or 0)
    known = [each for each in zip(group["rewards"], group["runs"], strict=True) if each[0] is not None]
    places = {"run": run["id"], "first": first, "last": last, "group": group["group"], "task": group["task_id"]}
    return places | {"best": max(known)[1], "worst": min(known)[1]}


def open_page(browser: Chromium, page: str, theme: str, width: int) -> None:
    """Open a page and wait until it shows its data."""
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=HEIGHT, deviceScaleFactor=1, mobile=False)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
    browser.open(page)
    browser.wait(LOADED)
    browser.evaluate("new Promise((done) => setTimeout(done, 400))")  # charts are drawn when they are in view
    browser.wait(LOADED)


def save_picture(browser: Chromium, path: Path, width: int) -> None:
    """What is on the screen, without empty space below it."""
    bottom = browser.evaluate("document.querySelector('main').getBoundingClientRect().bottom")
    clip = {"x": 0, "y": 0, "width": width, "height": min(bottom, HEIGHT), "scale": 1}
    path.write_bytes(base64.b64decode(browser.call("Page.captureScreenshot", format="png", clip=clip)["data"]))


def run_axe(browser: Chromium, checker: str) -> tuple[str, list[dict[str, Any]]]:
    """The checker's version and the rules that a page breaks."""
    browser.call("Runtime.evaluate", expression=checker)  # by the debugger: the page's policy allows no other script
    result = browser.evaluate(
        f"axe.run(document, {{runOnly: {json.dumps(RULES)}}}).then((result) => ({{version: result.testEngine.version, "
        "broken: result.violations.map((rule) => ({rule: rule.id, impact: rule.impact, num_elements: rule.nodes.length,"
        "element: rule.nodes[0].html.slice(0, 200), why: rule.nodes[0].failureSummary}))}))"
    )
    return result["version"], result["broken"]


if __name__ == "__main__":
    main()
