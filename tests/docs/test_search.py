"""The site's own search, in a browser, finds the page that answers a question among its first two hits.

The site is the one that `make docs` built; `make test` does so first.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from markdown_pages import ROOT

from chromium import Chromium, find_chromium
from conditions import skip_without

SITE = ROOT / "site"
NUM_HITS = 2
HOW_DO_I = "guides/how_do_i.html"
QUESTIONS = {
    "wandb": {HOW_DO_I, "pipeline.html"},
    "log to weights and biases": {HOW_DO_I},
    "two rewards": {HOW_DO_I, "judges.html"},
    "own loss function": {HOW_DO_I, "algorithms.html"},
    "out of memory": {HOW_DO_I, "guides/lora_one_gpu.html"},
    "LLM judge": {HOW_DO_I, "judges.html"},
    "data set column names": {HOW_DO_I},
    "resume a run": {HOW_DO_I, "reference/run_folder.html"},
    "several GPUs": {HOW_DO_I, "scaling.html"},
    "LoRA": {HOW_DO_I, "guides/lora_one_gpu.html"},
    "QLoRA 4-bit": {HOW_DO_I, "guides/lora_one_gpu.html", "finetune.html"},
    "save checkpoints": {HOW_DO_I},
    "hugging face hub dataset": {HOW_DO_I, "data.html"},
    "tools": {HOW_DO_I, "guides/tools.html", "tools.html", "environments.html"},
    "multi-turn agent": {HOW_DO_I},
    "langgraph": {HOW_DO_I, "frameworks.html"},
    "node.js javascript worker": {HOW_DO_I, "serve.html"},
    "reward does not rise": {HOW_DO_I, "guides/flat_reward.html"},
    "see rollouts": {HOW_DO_I, "viewer.html"},
    "test my agent before training": {HOW_DO_I, "check.html"},
    "learning rate": {HOW_DO_I, "guides/lora_one_gpu.html", "guides/flat_reward.html"},
    "which algorithm": {HOW_DO_I, "guides/choose_algorithm.html"},
    "KL penalty": {HOW_DO_I, "algorithms.html"},
    "SFT before RL": {HOW_DO_I, "finetune.html", "guides/lora_one_gpu.html"},
    "DPO": {HOW_DO_I, "algorithms.html"},
    "compare models": {HOW_DO_I, "pipeline.html"},
    "early stopping": {HOW_DO_I, "pipeline.html"},
    "export to ollama": {HOW_DO_I, "export.html"},
    "gguf": {HOW_DO_I, "export.html"},
    "vllm": {HOW_DO_I, "vllm.html"},
    "slow rollouts": {HOW_DO_I, "staleness.html"},
    "tasks too easy": {HOW_DO_I, "data.html", "guides/flat_reward.html"},
    "same seed": {HOW_DO_I},
    "which model fits on my GPU": {HOW_DO_I, "guides/lora_one_gpu.html"},
}
"""What a user types, and the pages that answer it."""


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    if find_chromium() is None:
        pytest.skip("needs Chromium")
    if not (SITE / "search" / "search_index.json").exists():
        skip_without("site", "needs the built site: run `make docs`")
    handler = partial(QuietHandler, directory=str(SITE))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with Chromium(tmp_path_factory.mktemp("profile"), width=400, height=300) as page:  # drawn sooner
            page.open(f"http://127.0.0.1:{server.server_address[1]}/index.html")
            page.wait("document.querySelector('[data-md-component=search-query]')")
            page.evaluate("document.querySelector('#__search').click()")
            yield page
        server.shutdown()


def find_hits(browser: Chromium, query: str) -> list[str]:
    """Pages of the hits, best first."""
    script = """(async query => {
        const input = document.querySelector('[data-md-component=search-query]');
        const list = document.querySelector('.md-search-result__list');
        const settle = async () => {
            for (let round = 0, same = 0, before = null; round < 100 && same < 4; round++) {
                await new Promise(done => setTimeout(done, 40));
                same = list.innerHTML && list.innerHTML === before ? same + 1 : 0;
                before = list.innerHTML;
            }
        };
        input.focus();
        list.innerHTML = '';
        input.value = query;
        input.dispatchEvent(new Event('keyup'));
        await settle();
        const items = [...list.querySelectorAll('.md-search-result__item')];
        return items.map(item => item.querySelector('a').pathname.slice(1));
    })"""
    return list(browser.evaluate(f"{script}({json.dumps(query)})"))


def test_search_answers_questions(browser: Chromium) -> None:
    missed = {}
    for query, pages in QUESTIONS.items():
        hits = find_hits(browser, query)
        if not pages & set(hits[:NUM_HITS]):
            missed[query] = hits[:4]
    assert not missed, "\n".join(f"{query!r} finds {hits}" for query, hits in missed.items())
