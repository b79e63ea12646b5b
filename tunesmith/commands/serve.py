"""A training run whose workflows are programs outside of this process, in any language."""

from __future__ import annotations

from functools import partial

from tunesmith.arguments import read_api_key
from tunesmith.cluster.rank_info import find_rank_info
from tunesmith.commands.tune.ranks import Server
from tunesmith.commands.tune.tune import TuneResult, run_tuning
from tunesmith.config import RunConfig, ServeSection
from tunesmith.errors import ConfigError
from tunesmith.http_server import check_port
from tunesmith.rollout.chat_model import ChatModel
from tunesmith.rollout.signature import check_judge_function
from tunesmith.rollout.task_server.app import KNOB, ServerLimits, serve_live, serve_tasks
from tunesmith.rollout.task_server.live import LiveSessions
from tunesmith.rollout.task_server.queue import TaskQueue
from tunesmith.runs.load_function import load_function
from tunesmith.runs.placement import place_server
from tunesmith.runs.policy import BuildModel
from tunesmith.types import JudgeType, WorkflowType

END_GRACE_S = 5.0
"""After the last step, the server answers for so long workers that are about to ask for a task."""


def run_serving(config: RunConfig, *, judge: JudgeType | None, build_model: BuildModel) -> TuneResult:
    """Serve tasks to workers and train on their rollouts; the server listens from the first step to the last.

    `build_model`: the class of the auxiliary models that a judge receives.
    """
    if config.workflow is not None:
        raise ConfigError(f"workflow={config.workflow!r} has no effect with `tunesmith serve`: workers run the agent")
    section = config.serve or ServeSection()
    section = place_server(section, config, find_rank_info())
    if section.mode == "online" and judge is not None:
        raise ConfigError("judge_func has no effect with serve.mode=online: clients post the reward")
    if judge is None and config.judge is not None:
        judge = load_function(config.judge, knob="judge")
    if judge is not None:
        check_judge_function(judge)
    limits = ServerLimits(
        host=section.host,
        port=section.port,
        api_key=read_api_key(section.api_key_env, knob="serve.api_key_env"),
        max_body_bytes=int(config.rollout.max_body_mib * 2**20),
        max_requests=section.max_requests,
        public_url=section.public_url,
    )
    check_port(section.port, host=section.host, knob=KNOB)
    workflow: WorkflowType
    if section.mode == "online":
        sessions = LiveSessions(
            seed=config.seed, feedback_timeout_s=section.feedback_timeout_s, max_sessions=section.max_sessions
        )
        workflow = sessions.run_session
        server = Server(
            start=partial(serve_live, sessions, limits=limits),
            model=sessions,
            notice="model for live traffic: {url}/v1",
        )
    else:
        queue = TaskQueue(
            timeout_s=config.rollout.timeout_s, lost_after_s=section.lost_after_s, has_judge=judge is not None
        )
        workflow = queue.run_attempt
        start = partial(serve_tasks, queue, limits=limits, end_grace_s=END_GRACE_S)
        server = Server(start=start, notice="tasks for workers: {url}/tasks/next")
    return run_tuning(
        config.model_copy(update={"serve": section}),
        workflow=workflow,
        judge=judge,
        # rollouts have a model that no function in this process calls
        build_model=build_model if config.auxiliary_models else ChatModel,
        server=server,
    )
