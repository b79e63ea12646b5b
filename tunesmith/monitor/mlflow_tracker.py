"""MLflow tracker: one MLflow run per run, with the project as its experiment.

MLFLOW_TRACKING_URI names a server or a store; without it MLflow writes `mlflow.db` in the current folder, which
`mlflow ui` shows. MLflow restricts the characters in metric names: `@` becomes `_at_`, any other illegal one `_`. It
keeps duplicate records of a step, so steps that a killed run logged after its last commit are not logged again. Metrics
that the server rejects are kept and sent with the next step.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping

from mlflow import MlflowClient, MlflowException
from mlflow.entities import Metric, Param

from tunesmith.errors import ConfigError
from tunesmith.monitor.tracker import TrackedRun

ILLEGAL = re.compile(r"[^\w\-. :/]")
MAX_METRICS_PER_CALL = 1000
MAX_PARAMS_PER_CALL = 100
MAX_PARAM_CHARS = 6000

logger = logging.getLogger(__name__)


class MlflowTracker:
    """Logs to an MLflow run through `MlflowClient`, which does not change the active run of the process."""

    def __init__(self, run: TrackedRun, name: str) -> None:
        self._pending: list[Metric] = []
        self._last_steps: dict[str, int] = {}
        saved = run.load_id(name)
        try:
            self._client = MlflowClient()
            self._run_id = self._create_run(run) if saved is None else self._resume_run(saved)
        except MlflowException as error:
            raise ConfigError(
                f"monitor.trackers: mlflow cannot start: {' '.join(str(error).split())[:500]} "
                "(MLFLOW_TRACKING_URI names the server or store)"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        named = {name_metric(name): value for name, value in metrics.items()}
        self._pending += [
            Metric(key=name, value=value, timestamp=now_ms, step=step)
            for name, value in named.items()
            if step > self._last_steps.get(name, -1)
        ]
        self._send()

    def close(self, *, is_failed: bool) -> None:
        self._send()
        try:
            self._client.set_terminated(self._run_id, status="FAILED" if is_failed else "FINISHED")
        except MlflowException as error:
            logger.warning("mlflow: the end of the run was not recorded: %s", error)

    def _create_run(self, run: TrackedRun) -> str:
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = self._client.create_experiment(run.project) if experiment is None else experiment.experiment_id
        run_id: str = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        params = [Param(name_metric(key), value[:MAX_PARAM_CHARS]) for key, value in run.settings.items()]
        for start in range(0, len(params), MAX_PARAMS_PER_CALL):
            self._client.log_batch(run_id, params=params[start : start + MAX_PARAMS_PER_CALL])
        run.save_id("mlflow", run_id)
        return run_id

    def _resume_run(self, run_id: str) -> str:
        found = self._client.get_run(run_id)
        self._client.update_run(run_id, status="RUNNING")
        self._last_steps = {
            name: max(record.step for record in self._client.get_metric_history(run_id, name))
            for name in found.data.metrics
        }
        return run_id

    def _send(self) -> None:
        while self._pending:
            batch = self._pending[:MAX_METRICS_PER_CALL]
            try:
                self._client.log_batch(self._run_id, metrics=batch)
            except MlflowException as error:
                logger.warning("mlflow: %d metrics were rejected and will be resent: %s", len(self._pending), error)
                return
            del self._pending[: len(batch)]


def name_metric(name: str) -> str:
    """The metric name with characters that MLflow does not allow replaced."""
    return ILLEGAL.sub("_", name.replace("@", "_at_"))
