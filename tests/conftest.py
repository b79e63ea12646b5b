"""Settings of all tests: one torch thread, no network, deterministic property tests, GPU tests skipped without a GPU.

The terminal summary lists the skipped tests, grouped by reason.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# whether there is a GPU is then asked without starting CUDA, which forks of this process could not use
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# no test uses TLS, but every HTTP client would read the certificates of all authorities, longer than its requests take
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.devnull

import hypothesis
import pytest
import torch

from conditions import SkippableTime
from file_order import put_long_files_first
from forked_programs import start_forked_programs
from forked_workers import pytest_addoption as pytest_addoption
from forked_workers import pytest_runtestloop as pytest_runtestloop
from skip_summary import pytest_terminal_summary as pytest_terminal_summary

# pytest adds handlers to loggers that do not propagate, and with one torch would print every graph that it compiles
logging.getLogger("torch.__trace").propagate = True

hypothesis.settings.register_profile(
    "tunesmith",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # fails a test when other processes take the cores
    derandomize=True,
    max_examples=30,
    print_blob=True,
)
hypothesis.settings.load_profile("tunesmith")


def pytest_configure() -> None:
    """Let Ctrl-C interrupt this process and its children also in the background of a shell, which ignores it there."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # until all tests are imported: little of that is garbage, and `freeze_imported` collects it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    torch.set_num_threads(1)
    put_long_files_first(items)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:  # `keywords` has the names of parent folders too
            item.add_marker(skip)


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.workers > 1:
        with contextlib.suppress(ImportError):  # an extra, which takes a second, and which runs in all workers import
            import agentscope  # noqa: F401
    freeze_imported()
    gc.enable()
    if session.config.option.workers:
        start_forked_programs()  # the workers share it; by now all modules are compiled


def freeze_imported() -> None:
    """Exempt what is imported by now from garbage collection: runs collect all garbage between stages and models, and
    the objects of the libraries would take most of that time."""
    global num_frozen_modules
    num_frozen_modules = len(sys.modules)
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def frozen_imports() -> None:
    """What the tests of the files before have imported, such as torch's compiler, is exempt too."""
    if len(sys.modules) > num_frozen_modules + 50:
        freeze_imported()


@pytest.fixture
def passing_time(monkeypatch: pytest.MonkeyPatch) -> SkippableTime:
    """Time that the test can let pass without waiting."""
    return SkippableTime(monkeypatch)


@pytest.fixture(scope="session")
def pocket_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a small pocket model with random weights."""
    from small_pocket import write_small_pocket  # imports transformers, which runs of few tests need not

    return str(write_small_pocket(tmp_path_factory.mktemp("models") / "pocket"))
