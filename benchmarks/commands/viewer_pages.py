"""Every page of `tunesmith view` on real runs: pictures for the docs, findings of axe-core, and widths on a phone.

The runs are those of `tunesmith demo` with seeds 0 and 1, which this script makes unless it is given their folders.
Each page is opened in headless Chromium, in light and in dark, checked by axe-core (the rules of WCAG 2.2 A and AA), and
opened again 390 pixels wide, where it must not scroll sideways. axe-core is not part of Tunesmith:

npm install --prefix /tmp/axe axe-core
python -m benchmarks.commands.viewer_pages --axe /tmp/axe/node_modules/axe-core/axe.min.js \\
    --out results/commands/viewer_pages.json --images docs/images [RUNS ...]
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

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from chromium import Chromium

WIDTH, HEIGHT, PHONE = 1280, 800, 390
IMPACTS = ("serious", "critical")
PAGES: Mapping[str, str] = {
    "curves": "#/",
    "curves_log": "#/?metric=train/&x=time&y=log&smooth=0.6",
    "run": "#/run/{run}",
    "step": "#/step/{run}/{last}",
    "group": "#/group/{run}/{last}/{group}",
    "trie": "#/group/{run}/{first}/{group}?view=trie",
    "rollout": "#/rollout/{run}/{last}/{group}/0",
    "tokens": "#/rollout/{run}/{last}/{group}/0?view=tokens",
    "search": "#/search/{run}?tool=*&sort=longest",
    "tasks": "#/task/{run}",
    "task": "#/task/{run}?id={task}&before={run}/{first}/{group}/0&after={run}/{first}/{group}/1",
    "failures": "#/failures/{run}",
    "selector": "#/selector/{run}",
    "evaluations": "#/evaluations?show=differ",
}
PICTURES = {"curves": "light", "run": "light", "step": "light", "rollout": "light", "tokens": "light", "trie": "dark"}
PICTURES |= {"task": "light", "evaluations": "light"}
"""Pages that the docs show, and their theme."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", help="folders with runs; default: those of the demo, which take minutes")
    parser.add_argument("--axe", type=Path, help="axe.min.js; without it nothing is checked but widths")
    parser.add_argument("--out", type=Path, help="where the findings are written")
    parser.add_argument("--images", type=Path, help="folder of the pictures")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = args.runs or make_runs(Path(folder))
        with serve(runs) as url, Chromium(Path(folder) / "profile", width=WIDTH, height=HEIGHT) as browser:
            found = check_pages(browser, url, axe=args.axe, images=args.images)
    print(json.dumps(found["summary"], indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    if found["summary"]["num_serious"] or found["summary"]["pages_that_scroll_sideways"]:
        sys.exit(1)


def make_runs(folder: Path) -> list[str]:
    for seed in ("0", "1"):
        subprocess.run([sys.executable, "-m", "tunesmith", "demo", "--seed", seed, "--out", str(folder)], check=True)
    return [str(folder)]


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


def check_pages(browser: Chromium, url: str, *, axe: Path | None, images: Path | None) -> dict[str, Any]:
    places = find_places(browser, url)
    checker = axe.read_text(encoding="utf-8") if axe is not None else None
    found: list[dict[str, Any]] = []
    wide: list[str] = []
    version = None
    for name, address in PAGES.items():
        page = url + address.format(**places)
        for theme in ("light", "dark"):
            set_width(browser, WIDTH)
            open_page(browser, page, theme)
            if images is not None and PICTURES.get(name) == theme:
                save_picture(browser, images / f"viewer_{name}.png")
            if checker is not None:
                version, violations = run_axe(browser, checker)
                found += [{"page": name, "theme": theme, "width": WIDTH} | each for each in violations]
        set_width(browser, PHONE)
        open_page(browser, page, "light")
        if images is not None and name == "step":
            save_picture(browser, images / "viewer_phone.png", height=844)
        if browser.evaluate("document.documentElement.scrollWidth") > PHONE:
            wide.append(name)
        if checker is not None:
            _, violations = run_axe(browser, checker)
            found += [{"page": name, "theme": "light", "width": PHONE} | each for each in violations]
    summary = {
        "axe_core": version,
        "num_pages": len(PAGES),
        "num_serious": sum(each["impact"] in IMPACTS for each in found),
        "num_others": sum(each["impact"] not in IMPACTS for each in found),
        "pages_that_scroll_sideways": wide,
        "errors_in_the_console": browser.errors,
    }
    return {"summary": summary, "findings": found}


def find_places(browser: Chromium, url: str) -> dict[str, Any]:
    """A run with rollouts, its first and last step, and a group of it whose rewards differ and whose task is tried
    there."""
    browser.open(url)
    browser.wait("document.querySelector('.chart canvas')")

    def get(path: str) -> Any:
        return browser.evaluate(f"fetch('api/{path}').then((response) => response.json())")

    run = next(each for each in get("runs")["runs"] if each["steps"])
    first, last = run["steps"][0][0], run["steps"][-1][-1]
    groups = get(f"step/{run['id']}/{first}")["groups"]
    group = max(groups, key=lambda each: each["std"] or 0)
    return {"run": run["id"], "first": first, "last": last, "group": group["group"], "task": group["task_id"]}


def set_width(browser: Chromium, width: int) -> None:
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=HEIGHT, deviceScaleFactor=1, mobile=False)


def open_page(browser: Chromium, page: str, theme: str) -> None:
    """Open a page and wait until it shows its data."""
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
    browser.open(page)
    loaded = "document.querySelector('main') && ![...document.querySelectorAll('.note')].some((n) => n.innerText === 'Loading')"
    browser.wait(loaded)
    browser.evaluate("new Promise((done) => setTimeout(done, 400))")  # charts are drawn when they are in view
    browser.wait(loaded)


def save_picture(browser: Chromium, path: Path, *, height: int = HEIGHT) -> None:
    path.write_bytes(base64.b64decode(browser.call("Page.captureScreenshot", format="png")["data"]))


def run_axe(browser: Chromium, checker: str) -> tuple[str, list[dict[str, Any]]]:
    """The checker's version and the rules that a page breaks."""
    browser.call("Runtime.evaluate", expression=checker)  # by the debugger: the page's policy allows no other script
    tags = json.dumps(["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"])
    result = browser.evaluate(
        f"axe.run(document, {{runOnly: {tags}}}).then((r) => ({{version: r.testEngine.version, violations: "
        "r.violations.map((v) => ({rule: v.id, impact: v.impact, num: v.nodes.length, example: v.nodes[0].html.slice(0, 200),"
        "why: v.nodes[0].failureSummary.slice(0, 300)}))}))"
    )
    return result["version"], result["violations"]


if __name__ == "__main__":
    main()
