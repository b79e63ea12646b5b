"""Start the ranks of a run on this host, with torchrun's agent, and report why one failed.

The agent watches the processes: when one ends with an error or is killed, it stops the others, which may wait for it
in a collective, within `torchrun`'s grace time of 30 s.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tunesmith.cluster.rank_info import LAUNCHED, use_loopback
from tunesmith.errors import RankError

MONITOR_INTERVAL_S = 0.1
SHUTDOWN_TIMEOUT_S = 3600
"""Longest wait after a signal, with which the ranks finish and save their step. A second signal is passed on too."""


def launch_ranks(num_ranks: int, arguments: Sequence[str]) -> None:
    """Run `python -m tunesmith ARGUMENTS` as `num_ranks` processes; raise RankError with the cause if one fails.

    SystemExit after Ctrl-C or SIGTERM, with the shell's status.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=f"tunesmith-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL_S,
        local_addr="127.0.0.1",
        logs_specs=DefaultLogsSpecs(),
    )
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_TIMEOUT_S))
    os.environ[LAUNCHED] = str(os.getpid())
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # errors are described here
    use_loopback()
    try:
        elastic_launch(config, sys.executable)("-m", "tunesmith", *arguments)
    except ChildFailedError as error:
        raise RankError(describe_failures(error)) from None
    except SignalException as error:
        raise SystemExit(128 + int(error.sigval)) from None
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        del os.environ[LAUNCHED]


def describe_failures(error: ChildFailedError) -> str:
    """The first cause among the failed ranks; ranks that only lost another one are not a cause."""
    failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
    causes = [(rank, failure) for rank, failure in failures if read_kind(failure) != RankError.__name__]
    rank, failure = (causes or failures)[0]
    if read_kind(failure):
        return str(failure.error_file_data["message"]["message"])
    if failure.exitcode < 0:
        how = f"was killed by signal {-failure.exitcode} ({failure.signal_name()})"
    else:
        how = f"ended with status {failure.exitcode}"
    return (
        f"rank {rank} {how}, and the other ranks were stopped: to resume from the last checkpoint, repeat the command "
        "with --resume"
    )


def read_kind(failure: ProcessFailure) -> str:
    """The class of a rank's error, '' if it left none."""
    message = failure.error_file_data.get("message", {})
    extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    return str(extra.get("py_callstack", ""))
