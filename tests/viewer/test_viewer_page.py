"""The page in headless Chromium: every view, the keyboard, following a run, and text that tries to run."""

from __future__ import annotations

import fcntl
import json
import os
import threading

import pytest
import uvicorn
from viewer_runs import HOSTILE, write_comparison, write_run, write_step

from chromium import Chromium, find_chromium
from tunesmith.http_server import build_config, open_listener
from tunesmith.storage import RunPaths
from tunesmith.viewer.answers.table import Answers
from tunesmith.viewer.export import export_report
from tunesmith.viewer.reading.run import open_runs
from tunesmith.viewer.server import build_app

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="needs Chromium (apt-get install chromium)")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The address of a server, and the folder of its first run, to which tests add steps."""
    root = write_run(tmp_path_factory.mktemp("live") / "live")
    answers = Answers(open_runs([root, write_comparison(root.parent / "eval")]), paths=[str(root.parent / "later")])
    with open_listener("127.0.0.1", 0, knob="--port") as listener:
        server = uvicorn.Server(build_config(build_app(answers), listener, has_key=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/", root
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def browser(tmp_path_factory, served):
    """A browser that has opened the page."""
    with Chromium(tmp_path_factory.mktemp("profile")) as chromium:
        chromium.open(served[0])
        yield chromium


PHONE = 390
VIEWS = {
    "#/": ["rollout/reward_mean", "finished", "4 / 4"],
    "#/?x=time&y=log": ["rollout/reward_mean"],
    "#/run/0": ["step 4 of 4", "Findings of tunesmith doctor", "algorithm.algorithm_type", "grpo"],
    "#/step/0/2": ["2 groups, 6 rollouts", "train/0", "1 failed", "sampled tokens outline: step 1"],
    "#/group/0/2/1": ["1 + 2", "calculate", "+0.500"],
    "#/group/0/2/0?view=trie": ["instead of", "rollouts"],
    "#/rollout/0/2/0/0": [HOSTILE, "assistant", "calculate", "turn 2"],
    "#/rollout/0/2/0/2": ["failed in judge", "judge.py:3 in judge", "Traceback"],
    "#/rollout/0/2/0/0?view=tokens&color=mask": ["<|im_start|>", "sampled, not trained", "logprob"],
    "#/search/0?text=answer": [HOSTILE, "of 24 that match"],
    "#/task/0?id=train/0&before=0/1/0/0&after=0/4/0/1": ["step 1 rollout 0", HOSTILE],
    "#/task/0": ["2 tasks tried", "1 + 4"],
    "#/failures/0": ["4 of 24 rollouts failed, 1 cause", HOSTILE],
    "#/selector/0/1": ["near the target", "selector/rho"],
    "#/evaluations?columns=0:0,0:4,1:%3Dsft": ["step 0: <script>", "from sft"],
    "#/config/0": ["algorithm.algorithm_type", "grpo"],
    "#/step/9/1": ["This run has no rollouts"],
    "#/nothing": ["There is no page nothing"],
}


def show(browser, view):
    """Another view of the page that is open, which takes a tenth of loading the page."""
    browser.evaluate(f"location.hash = {json.dumps(view)}")


def test_views_show_their_data_on_a_phone_and_nothing_runs(browser, served):
    browser.errors.clear()
    browser.call("Emulation.setDeviceMetricsOverride", width=PHONE, height=844, deviceScaleFactor=1, mobile=False)
    browser.open(served[0])
    for view, texts in VIEWS.items():
        show(browser, "#/nothing")  # so that no text of the view before is taken for one of this view
        browser.wait_for_text("There is no page nothing")
        show(browser, view)
        for text in texts:
            browser.wait_for_text(text)
        assert browser.evaluate("window.hacked === undefined && !document.querySelector('main img, main script')"), view
        assert browser.evaluate("document.documentElement.scrollWidth") == PHONE, f"{view} scrolls sideways"
    browser.call("Emulation.setDeviceMetricsOverride", width=1280, height=860, deviceScaleFactor=1, mobile=False)
    assert browser.errors == []


def test_curves_are_drawn_over_steps_and_time_and_runs_can_be_hidden(browser, served):
    show(browser, "#/?metric=reward_mean&x=time&y=log")
    chart = "document.querySelector('[data-metric=\"rollout/reward_mean\"]')"
    browser.wait(f"{chart} && {chart}.querySelector('canvas')")
    hover = "new MouseEvent('mousemove', {bubbles: true, clientX: box.right - 1, clientY: box.top + 5})"
    browser.evaluate(
        f"(() => {{ const over = {chart}.querySelector('.u-over'); const box = over.getBoundingClientRect();"
        f"over.dispatchEvent({hover}); }})()"
    )
    browser.wait_for_text("9.5 s 0.400")  # 4 steps of 2 s and an evaluation
    browser.evaluate("document.querySelector('table.runs input').click()")
    browser.wait("location.hash.includes('hide=0')")


def test_notes_are_saved_and_runs_are_found_by_their_tags(browser, served):
    show(browser, "#/run/0")
    browser.wait("document.querySelector('.notes textarea')")
    for field, text in (("input", "baseline, seed 1"), ("textarea", HOSTILE)):
        browser.evaluate(
            f"(() => {{ const field = document.querySelector('.notes {field}'); field.value = {json.dumps(text)};"
            "field.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )
    browser.evaluate("document.querySelector('.notes button').click()")
    browser.wait("document.querySelector('.notes button').innerText === 'saved'")
    assert json.loads((served[1] / "notes.json").read_text()) == {"note": HOSTILE, "tags": ["baseline", "seed 1"]}
    show(browser, "#/")
    browser.wait_for_text(HOSTILE)
    browser.evaluate("document.querySelector('.tag').click()")
    browser.wait("location.hash.includes('runs=baseline')")
    browser.wait("document.querySelectorAll('table.runs tbody tr').length === 1")


def test_tokens_are_colored_and_described(browser, served):
    show(browser, "#/rollout/0/2/1/1?view=tokens&color=advantage")
    browser.wait("document.querySelectorAll('.tokens .sampled').length > 5")
    assert browser.evaluate("getComputedStyle(document.querySelector('.tokens .sampled')).backgroundColor").startswith(
        "rgb"
    )
    assert (
        browser.evaluate("getComputedStyle(document.querySelector('.tokens .context')).backgroundColor")
        == "rgba(0, 0, 0, 0)"
    )
    browser.evaluate(
        "document.querySelector('.tokens .sampled').dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))"
    )
    browser.wait_for_text("advantage +0.500 · policy version 1")


def test_the_keyboard_moves_through_a_run(browser, served):
    show(browser, "#/step/0/1")
    browser.wait_for_text("2 groups, 6 rollouts")
    for key in ("j", "j", "Enter"):
        browser.press(key)
    browser.wait("location.hash === '#/group/0/1/1'")
    browser.wait_for_text("response")
    for key in ("j", "Enter"):
        browser.press(key)
    browser.wait("location.hash.startsWith('#/rollout/0/1/1/0')")
    browser.wait_for_text("rollout 0")
    browser.press("]")
    browser.wait("location.hash.startsWith('#/rollout/0/1/1/1')")
    browser.wait_for_text("rollout 1")
    browser.press("t")
    browser.wait("location.hash.includes('view=tokens') && document.querySelector('.tokens')")
    browser.press("c")
    browser.wait("location.hash.includes('color=mask')")
    browser.press("u")
    browser.wait("location.hash.startsWith('#/group/0/1/1')")
    browser.wait_for_text("response")
    browser.press("?")
    browser.wait_for_text("Every view is a link")
    browser.press("Escape")
    browser.wait("!document.querySelector('.help')")
    theme = browser.evaluate("document.documentElement.dataset.theme")
    browser.press("d")
    browser.wait(f"document.documentElement.dataset.theme !== '{theme}'")
    browser.press("d")
    browser.press("4")
    browser.wait("location.hash.startsWith('#/search/0')")
    browser.wait_for_text("rollouts in the run")
    browser.press("/")
    browser.wait("document.activeElement.dataset.main !== undefined")
    browser.press("j")
    assert browser.evaluate("document.activeElement.value") == "j", "keys type while a filter has the focus"
    for _ in range(2):  # another theme draws the page again
        browser.evaluate("document.querySelector('button[aria-label=\"dark or light\"]').click()")
        browser.evaluate("new Promise((done) => setTimeout(done, 20))")
    assert browser.evaluate("document.activeElement.value") == "j", "what is typed survives changes of the page"


def test_what_is_typed_at_once_into_a_new_page_stays(browser, served):
    """Before the browser has painted the page, as on a busy machine."""
    show(browser, "#/config/0")
    browser.wait_for_text("algorithm.algorithm_type")
    typed = browser.evaluate(
        """new Promise((done) => {
            new MutationObserver((changes, observer) => {
                const input = document.querySelector("[data-main][placeholder^='in task']");
                if (!input) return;  // the page before has a main input too
                observer.disconnect();
                input.value = "j";
                input.dispatchEvent(new Event("input", {bubbles: true}));
                setTimeout(() => done(document.querySelector("[data-main]").value), 300);
            }).observe(document.body, {childList: true, subtree: true});
            location.hash = "#/search/0";
        })"""
    )
    assert typed == "j"


def test_a_filter_is_part_of_the_link(browser, served):
    show(browser, "#/search/0")
    browser.wait_for_text("24 shown")
    browser.evaluate(
        "(() => { const input = document.querySelector('input[placeholder=min]'); input.value = '1';"
        "input.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )
    browser.wait("location.hash.includes('min_reward=1')")
    browser.wait_for_text("12 shown")


def test_a_running_run_is_followed_and_one_that_starts_later_is_shown(browser, served):
    url, root = served
    lock = RunPaths(root).lock
    lock.write_text(str(os.getpid()))
    with lock.open("rb") as held:  # a running run is asked for more often
        fcntl.flock(held, fcntl.LOCK_EX)
        browser.open(url + "#/step/0/latest")
        browser.wait_for_text("of 4")
        write_step(RunPaths(root), 5, num_groups=3)
        with (root / "metrics.jsonl").open("a") as file:
            file.write('{"step": 5, "kind": "train", "rollout/reward_mean": 0.9}\n')
        write_run(root.parent / "later" / "second", num_groups=1)
        browser.wait_for_text("3 groups, 9 rollouts")
        browser.wait_for_text("of 5")
        browser.wait("[...document.querySelectorAll('.runpicker option')].some((each) => each.text === 'second')")


def test_a_report_works_as_a_file(browser, tmp_path, run):
    export_report([run], tmp_path / "report.html", max_bytes=2**22)
    browser.errors.clear()
    for view, texts in {
        "#/": ["rollout/reward_mean", "This report leaves out"],
        "#/rollout/0/2/0/2": [HOSTILE, "failed in judge"],
        "#/evaluations": ["step 4: <script>"],
        "#/search/0": ["A report cannot search"],
        "#/step/0/99": ["left out of the report"],
    }.items():
        browser.open(f"file://{tmp_path}/report.html{view}")
        for text in texts:
            browser.wait_for_text(text)
    assert browser.evaluate("window.hacked === undefined") and browser.errors == []
