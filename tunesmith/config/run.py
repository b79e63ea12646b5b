"""Knobs of a reinforcement-learning run: type, default, effect, unit, and when to change them.

A run file is one `RunConfig`. Unknown keys are errors that suggest the nearest known key. Validators only check and
raise; they correct no value and access neither disk nor network. A component receives its section, not the whole
config.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from tunesmith.config.algorithm import AlgorithmSection, check_bounds
from tunesmith.config.callbacks import CallbacksSection, EarlyStoppingSection, KeepBestSection, check_metric_name
from tunesmith.config.cluster import ClusterSection, check_sharded_weights
from tunesmith.config.engine.engine import EngineSection
from tunesmith.config.environment.environment import EnvironmentSection, add_environment_tasks
from tunesmith.config.experience import ExperienceSection, OperatorSection
from tunesmith.config.model import AuxiliaryModelSection, ModelSection, refuse_dropout
from tunesmith.config.rollout.branching import BranchingSection, check_branching
from tunesmith.config.rollout.staleness import StalenessKnobs, check_staleness_knobs
from tunesmith.config.section import TASK_KNOBS, LearningRate, Needs, NumThreads, Section, Temperature, Unused
from tunesmith.config.serve.serve import ServeSection, check_serve

Beta = Annotated[float, Field(ge=0, lt=1)]


class SelectorSection(Section):
    """Order in which the tasks of a data set are chosen."""

    selector_type: str = "shuffle"
    """Selector: sequential, shuffle, random, offline_easy2hard, difficulty_based (BOTS), pareto, or your own as
    `module:function`."""
    seed: int | None = Field(default=None, ge=0)
    """Random seed of the selector; null uses the run's seed."""
    feature_keys: tuple[str, ...] = ()
    """Row fields with pass rates of reference models, from 0 to 1, for offline_easy2hard and difficulty_based."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the selector that differ from its defaults."""


class DatasetSection(Section):
    """A data set of tasks."""

    path: str
    """Folder of jsonl, json, csv or parquet files, one such file, a folder written by `save_to_disk`, or a hub id; in a
    file whose `environment` has a name, `environment` stands for its tasks."""
    name: str | None = None
    """Configuration (subset) of a data set that has several."""
    split: str | None = "train"
    """Split to read."""
    required_fields: tuple[str, ...] = ()
    """Fields that every row must have; checked before the model loads."""
    operators: tuple[OperatorSection, ...] = ()
    """Operators applied once to the tasks, in order: deduplicate, length_filter, quality_score, difficulty_score,
    priority_order, paraphrase."""
    task_selector: SelectorSection = SelectorSection()
    """Selection of training tasks; evaluations run all tasks."""
    weight: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Relative share of this set among several training sets; null in all of them mixes by size."""


class RolloutSection(StalenessKnobs):
    """Execution of workflows and judges."""

    timeout_s: float = Field(default=600.0, gt=0)
    """Time limit in seconds of one rollout, workflow and judge together; a rollout that exceeds it has failed."""
    max_concurrency: int = Field(default=256, ge=1)
    """Maximum number of concurrent workflows; also the number of threads for `asyncio.to_thread`."""
    thread_patience_s: float = Field(default=0.03, ge=0)
    """Mean duration in seconds up to which the engine waits for a function's calls in threads, so that sampling on a
    CPU does not depend on their timing; slower functions are not waited for. 0 never waits. Raise it if runs with
    slower tools must be reproducible."""
    http_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of 127.0.0.1 on which the models are also served over HTTP while workflows run, 0 for any free port. Set it
    for agents in other processes or languages; they use `model.base_url` and `model.api_key`."""
    max_body_mib: float = Field(default=8.0, gt=0, allow_inf_nan=False)
    """Maximum size of an HTTP request in MiB; larger ones get status 413."""
    chat_model: Literal["auto", "agentscope", "openai"] = "auto"
    """Type of a workflow's `model` argument: AgentScope's OpenAIChatModel, or a callable that returns OpenAI
    completions; auto uses AgentScope's if it is installed."""
    has_agent_output: bool = False
    """Let AgentScope's agents print every message to the console; by default their printing is disabled during the
    run."""
    max_failure_rate: float = Field(default=0.5, ge=0, le=1)
    """Maximum share of failed trajectories in a step; above it the run stops and reports the first causes."""
    assignment: Literal["plan", "balanced"] = "plan"
    """Which of several ranks runs a task: one by its position, so that CPU runs are reproducible, or the next one with
    room; `balanced` helps if `max_concurrency` is below the rollouts of a rank's share, which leaves tasks to take."""
    branching: BranchingSection | None = None
    """Let rollouts of training steps branch after tool results (ARPO, AEPO); null runs each from the task."""


class TrainerSection(Section):
    """Optimizer, memory and speed of training."""

    learning_rate: LearningRate = 1e-6
    """Peak learning rate of AdamW; adapters need a higher one (1e-5 to 1e-4)."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Warm-up as a share of all steps, rounded up; set either this or `warmup_steps`."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate schedule after the warm-up."""
    min_lr_ratio: Annotated[float, Needs("schedule", "cosine")] = Field(default=0.0, ge=0, le=1)
    """Final learning rate of the cosine schedule, as a share of the peak."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Decoupled weight decay; norms and biases are exempt."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    epsilon: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """AdamW's epsilon, added to the denominator."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Maximum gradient norm; larger gradients are scaled down."""
    num_minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per batch, each on whole groups; above 1 the later ones are off-policy and clipped."""
    max_tokens_per_row: int = Field(default=16384, ge=1)
    """Tokens packed into one forward and backward; lower it if training runs out of memory."""
    logprob_chunk_tokens: int | None = Field(default=None, ge=1)
    """Positions whose logits are materialized at once; lower it to save memory, the result is the same. null uses as
    many as fit in 0.6 GB or a 128th of its memory on a GPU, and 1024 on a CPU."""
    has_gradient_checkpointing: bool = False
    """Store only layer inputs and recompute activations in the backward pass: less memory, about a third more time."""
    has_compiled_layers: bool = True
    """On a GPU, compile and fuse the operations between matrix products. Compiling takes half a minute and is cached
    for later runs; disable it for runs of a few steps."""
    has_row_graphs: bool | None = None
    """Launch rows of similar sizes as CUDA graphs; the gradient is the same. null enables it for models below 0.4e9
    parameters, whose training is otherwise host-bound. It keeps the memory of gradients (4 bytes per trained parameter)
    and of the largest row allocated."""
    has_prefix_sharing: bool = True
    """Compute shared prefixes of a group's samples only once; the gradient is the same."""
    mismatch_warn: float = Field(default=1e-2, gt=0)
    """Mean KL between sampler and trainer, in nats per token, above which a warning is printed."""
    mismatch_stop: float = Field(default=1.0, gt=0)
    """Mean KL between sampler and trainer, in nats per token, above which the run stops."""

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.warmup_steps > 0 and self.warmup_ratio not in (0, type(self).model_fields["warmup_ratio"].default):
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and warmup_ratio={self.warmup_ratio}: set only one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_row_graphs(self) -> Self:
        if self.has_row_graphs and (self.has_gradient_checkpointing or not self.has_compiled_layers):
            raise ValueError("has_row_graphs needs has_compiled_layers=true and has_gradient_checkpointing=false")
        return self


class BehaviorSection(Section):
    """Measures of a tool agent's behavior: correctness per tool call, per failed call and per 1000 sampled tokens."""

    tool_keys: tuple[str, ...] = Field(default=("tool_calls",), min_length=1)
    """Metrics of the workflow whose sum is the number of tool calls."""
    error_keys: tuple[str, ...] = Field(default=("tool_errors",), min_length=1)
    """Metrics of the workflow whose sum is the number of failed tool calls."""
    conciseness_key: str = "conciseness"
    """Metric of the judge that a pipeline's report shows as conciseness; left out if no rollout reports it."""


class HeldOutSection(Section):
    """Rollouts of held-out tasks."""

    num_samples: int = Field(default=1, ge=1)
    """Rollouts per held-out task; raise it for narrower intervals and pass@k."""
    temperature: Temperature | None = None
    """Sampling temperature of evaluations; null uses the model's."""
    max_tasks: int | None = Field(default=None, ge=1)
    """Maximum number of held-out tasks per set, the first ones; null uses all."""
    behavior: BehaviorSection | None = None
    """Also report efficiency, successful_execution and reasoning_length; null does not. Set it for agents with
    tools."""


class EvaluationSection(HeldOutSection):
    """Evaluation during a run."""

    interval_steps: int = Field(default=100, ge=0)
    """Steps between evaluations of `eval_datasets`; 0 evaluates only at the end."""
    at_start: bool = False
    """Evaluate the model before the first step."""


class MonitorSection(Section):
    """Trackers and console output; metrics.jsonl is always written."""

    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "swanlab"], ...] = ("tensorboard",)
    """Experiment trackers that receive every metric under its name; all but tensorboard need the extra of the same
    name."""
    has_progress: bool = True
    """Show live progress on the console."""
    log_interval_steps: int = Field(default=1, ge=1)
    """Steps between console lines."""
    console_metrics: tuple[str, ...] = ()
    """Additional metrics on the console line of a step, by name or pattern: `rollout/accuracy/mean`,
    `rollout/*/mean`."""


EvalDatasets = Annotated[dict[str, DatasetSection], Unused(TASK_KNOBS, "evaluations run every task unchanged")]


class RunConfig(Section):
    """A reinforcement-learning run: model, tasks, agent, algorithm and output folder."""

    project: str = "AgentScope"
    """Folder under `checkpoint_root_dir` that groups runs."""
    name: str | None = None
    """Folder of the run, under `project`; null creates Experiment-<YYYYmmddHHMMSS>."""
    checkpoint_root_dir: str = "./checkpoints"
    """Root folder of all projects and runs."""
    seed: int = Field(default=42, ge=0)
    """Random seed of task order and sampling; on a CPU, equal seeds give equal runs."""
    workflow: str | None = None
    """Agent, as `module:function` or `file.py:function`; required on the command line, while `tune()` takes the
    function."""
    judge: str | None = None
    """Judge, in the same form; null uses the workflow's reward."""
    num_cpu_threads: NumThreads = 1
    """Threads of torch's CPU kernels. On small virtual machines 2 are slower than 1; on machines with many cores try
    more."""
    continue_from_checkpoint: bool = False
    """Resume the run of this name from its last checkpoint; without a checkpoint, start from the beginning."""
    resume_from_step: Annotated[int | None, Needs("continue_from_checkpoint", True)] = Field(default=None, ge=0)
    """Step to resume from, 0 for the beginning; null uses the newest checkpoint. Set it if the newest checkpoint is
    damaged or unwanted; files of later steps are moved to `old-<time>/` in the run folder."""
    total_epochs: int = Field(default=1, ge=1)
    """Passes over the training tasks."""
    total_steps: int | None = Field(default=None, ge=1)
    """Number of steps; overrides `total_epochs`."""
    save_interval_steps: int = Field(default=100, ge=1)
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int | None = Field(default=None, ge=1)
    """Number of newest checkpoints kept on disk; null keeps all."""
    keep_best: KeepBestSection | None = None
    """Also keep the checkpoint with the best evaluation, as `best` in the run folder; null does not."""
    early_stopping: EarlyStoppingSection | None = None
    """End the run once a metric no longer improves; null runs all steps."""
    callbacks: CallbacksSection = CallbacksSection()
    """Functions called after steps, evaluations and checkpoints."""
    steps_per_file: int = Field(default=100, ge=1)
    """Committed steps whose rollouts are merged into one Parquet file, and whose selections into one JSON Lines file,
    to bound the number of files; 1 keeps one file per step."""
    environment: EnvironmentSection = EnvironmentSection()
    """Protocol, tools and limits of `tunesmith.environments:tool_agent`, and of workflows with a parameter
    `environment`; or the name of an environment, whose tasks, workflow and rewards the file then has unless it names
    its own."""
    model: ModelSection
    auxiliary_models: dict[str, AuxiliaryModelSection] = Field(default_factory=dict)
    train_dataset: Annotated[DatasetSection | None, Unused(("weight",), "there is one set to draw from")] = None
    """Training tasks."""
    train_datasets: dict[str, DatasetSection] = Field(default_factory=dict)
    """Several training sets by name, instead of `train_dataset`; their tasks are mixed."""
    eval_datasets: EvalDatasets = Field(default_factory=dict)
    """Held-out task sets; the name becomes part of their metrics' names."""
    algorithm: AlgorithmSection = AlgorithmSection()
    experience: ExperienceSection = ExperienceSection()
    """Processing of groups between judge and trainer."""
    engine: EngineSection = EngineSection()
    rollout: RolloutSection = RolloutSection()
    serve: ServeSection | None = None
    """The server of `tunesmith serve`; other commands that train refuse it."""
    trainer: TrainerSection = TrainerSection()
    evaluation: EvaluationSection = EvaluationSection()
    monitor: MonitorSection = MonitorSection()
    cluster: ClusterSection = ClusterSection()
    """Ranks that run and train the tasks of a step together."""

    @model_validator(mode="before")
    @classmethod
    def _add_environment_tasks(cls, values: Any) -> Any:
        return add_environment_tasks(values, cls.model_fields)

    @model_validator(mode="after")
    def _check_names(self) -> RunConfig:
        for key, name in (("project", self.project), ("name", self.name)):
            if name is not None and not name.isprintable():
                raise ValueError(f"{key}={name!r} names a folder: it must be one line without control characters")
        return self

    @model_validator(mode="after")
    def _check_workers(self) -> RunConfig:
        num_workers, batch_size = self.cluster.num_workers or 1, self.algorithm.batch_size
        if num_workers > batch_size:
            raise ValueError(
                f"algorithm.batch_size={batch_size} is smaller than cluster.num_workers={num_workers}, and a task runs "
                "on one rank: raise the batch size, or use fewer ranks"
            )
        if self.cluster.has_sharded_gradients and self.trainer.has_row_graphs:
            raise ValueError("cluster.has_sharded_gradients and trainer.has_row_graphs exclude each other: set one")
        others = {
            "engine.kind=tunesmith, which samples from whole weights (set engine.kind=vllm)": self.engine.kind
            != "vllm",
            "model.lora": self.model.lora is not None,
            "model.residual_dtype=float32": self.model.residual_dtype == "float32",
            "trainer.has_row_graphs": bool(self.trainer.has_row_graphs),
            "rollout.assignment=balanced": self.rollout.assignment == "balanced",
            "algorithm.reference_refresh_steps": self.algorithm.reference_refresh_steps is not None,
        }
        check_sharded_weights(self.cluster, others)
        return self

    @model_validator(mode="after")
    def _check_training_sets(self) -> RunConfig:
        if self.train_dataset is not None and self.train_datasets:
            raise ValueError("train_dataset and train_datasets are both given: put every set in train_datasets")
        return self

    @model_validator(mode="after")
    def _check_dropout(self) -> RunConfig:
        refuse_dropout(self.model.lora, "reinforcement learning must train the function that it samples from")
        return self

    @model_validator(mode="after")
    def _check_watched_metrics(self) -> RunConfig:
        sets, interval_steps = self.eval_datasets, self.evaluation.interval_steps
        for knob, section in (("early_stopping", self.early_stopping), ("keep_best", self.keep_best)):
            if section is not None:
                check_metric_name(knob, section.metric, eval_sets=sets, interval_steps=interval_steps)
        return self

    @model_validator(mode="after")
    def _check_correction(self) -> RunConfig:
        correction, replay = self.algorithm.correction, self.experience.replay
        has_older = replay.num_groups or self.rollout.max_staleness or self.is_online
        check_bounds(correction, is_off_policy=bool(has_older or self.engine.has_separate_sampler))
        return self

    @model_validator(mode="after")
    def _check_branching(self) -> RunConfig:
        branching, group_size, temperature = self.rollout.branching, self.algorithm.group_size, self.model.temperature
        num_ranks, launcher = self.cluster.num_workers or 1, self.cluster.launcher
        check_serve(self.serve, num_ranks=num_ranks, launcher=launcher, has_branching=branching is not None)
        check_branching(branching, self.rollout.assignment, group_size=group_size, temperature=temperature)
        return self

    @model_validator(mode="after")
    def _check_staleness(self) -> RunConfig:
        replay = self.experience.replay
        check_staleness_knobs(
            self.rollout,
            replay_staleness=replay.max_staleness if replay.num_groups else None,
            has_branching=self.rollout.branching is not None,
            is_served=self.serve is not None,
        )
        return self

    @model_validator(mode="after")
    def _check_vllm(self) -> RunConfig:
        if self.engine.kind == "vllm" and self.rollout.branching is not None:
            raise ValueError("rollout.branching needs entropies, which engine.kind=vllm does not return: remove one")
        if self.engine.kind == "vllm" and self.rollout.max_staleness:
            raise ValueError("rollout.max_staleness needs engine.kind=tunesmith: requests of vLLM end with the step")
        return self

    @model_validator(mode="after")
    def _check_sampling_ranks(self) -> RunConfig:
        if self.cluster.sampling_ranks and not self.rollout.max_staleness:
            raise ValueError(
                f"cluster.sampling_ranks={self.cluster.sampling_ranks} needs rollout.max_staleness of 1 or more: "
                "samplers continue while the other ranks train, so tokens are one step old when they are trained; set "
                "rollout.max_staleness=1"
            )
        return self

    @model_validator(mode="after")
    def _check_weight_format(self) -> RunConfig:
        if self.engine.weight_format == "fp8" and self.model.lora is not None:
            raise ValueError(
                "engine.weight_format=fp8 copies whole weights, not adapters: leave it out with model.lora"
            )
        return self

    @property
    def is_online(self) -> bool:
        """Whether rollouts are live conversations instead of tasks."""
        return self.serve is not None and self.serve.mode == "online"

    @property
    def training_sets(self) -> dict[str, DatasetSection]:
        """The training sets by the name used in their tasks' ids."""
        return self.train_datasets if self.train_dataset is None else {"train": self.train_dataset}
