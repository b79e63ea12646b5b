"""Knobs of a reinforcement-learning run: type, default, effect, unit, and when to change them.

A run file is one `RunConfig`. Unknown keys are errors that suggest the nearest known key. Validators only check and
raise; they correct no value and access neither disk nor network. A component receives its section, not the whole
config.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, SerializationInfo, SerializerFunctionWrapHandler, model_serializer, model_validator

from tunesmith.config.algorithm import AlgorithmSection
from tunesmith.config.callbacks import CallbacksSection, EarlyStoppingSection, KeepBestSection, check_metric_name
from tunesmith.config.cluster import ClusterSection
from tunesmith.config.engine import EngineSection
from tunesmith.config.environment import EnvironmentSection, add_environment_tasks
from tunesmith.config.experience import ExperienceSection, OperatorSection
from tunesmith.config.model import AuxiliaryModelSection, ModelSection, refuse_dropout
from tunesmith.config.rollout import BranchingSection, RolloutSection
from tunesmith.config.section import (
    TASK_KNOBS,
    DataSection,
    LearningRate,
    Needs,
    NumThreads,
    Section,
    Temperature,
    Unused,
)
from tunesmith.config.serve import ServeSection

AGENTSCOPE_PROJECT = "AgentScope"
"""The default of `project` in earlier versions, and in AgentScope's form of `tune`."""
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


class DatasetSection(DataSection):
    """A data set of tasks."""

    later_knobs: ClassVar[tuple[str, ...]] = ("fields",)
    path: str
    """Folder of jsonl, json, csv or parquet files, one such file, a folder written by `save_to_disk`, or a hub id; in a
    file whose `environment` has a name, `environment` stands for its tasks."""
    required_fields: tuple[str, ...] = ()
    """Fields that every row must have; checked before the model loads."""
    fields: dict[str, Any] = Field(default_factory=dict)
    """Fields that are added to rows which lack them, for instance `ability: math` or `qa`, by which
    `tunesmith.judges.tir:tir_judge` scores equality of mathematics or F1 of words."""
    operators: tuple[OperatorSection, ...] = ()
    """Operators applied once to the tasks, in order: deduplicate, length_filter, quality_score, difficulty_score,
    priority_order, paraphrase."""
    task_selector: SelectorSection = SelectorSection()
    """Selection of training tasks; evaluations run all tasks."""
    weight: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Relative share of this set among several training sets; null in all of them mixes by size."""


class TrainerSection(Section):
    """Optimizer, memory and speed of training."""

    learning_rate: LearningRate | None = None
    """Peak learning rate of AdamW. null is 1e-6 for all weights, and in a run file 2e-5 with `model.lora`."""
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
    """Tokens packed into one forward and backward; lower it if training runs out of memory. If it is not set, rows
    that would not fit the GPU, by the estimate of `tunesmith doctor --plan`, are halved until they do."""
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
    parameters (4e9 with `model.numerics=exact`), whose training is otherwise host-bound. It keeps the memory of
    gradients (4 bytes per trained parameter) and of the largest row allocated."""
    has_prefix_sharing: bool = True
    """Compute shared prefixes of a group's samples only once; the gradient is the same."""
    routing_replay: bool = False
    """Train with the experts that the sampler chose for each token (R3), so that rounding chooses no others; for models
    with experts. Every token takes host memory: 384 bytes for Qwen3-30B-A3B."""
    router_aux_loss_coef: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Coefficient of the load-balancing loss of the routers; above 0 each update computes one more forward. Raise it
    (1e-3) if `routing/max_load` grows."""
    mismatch_warn: float = Field(default=1e-2, gt=0)
    """Mean KL between sampler and trainer, in nats per token, above which a warning is printed."""
    mismatch_stop: float = Field(default=1.0, gt=0)
    """Mean KL between sampler and trainer, in nats per token, above which the run stops."""

    @property
    def peak_learning_rate(self) -> float:
        """`learning_rate`, or its default for all weights."""
        return 1e-6 if self.learning_rate is None else self.learning_rate

    @model_validator(mode="after")
    def _check_knobs(self) -> Self:
        if self.warmup_steps > 0 and self.warmup_ratio not in (0, type(self).model_fields["warmup_ratio"].default):
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and warmup_ratio={self.warmup_ratio}: set only one of them"
            )
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


HELD_OUT = Needs("eval_datasets", reason="there are no held-out tasks")
EVALUATION_KNOBS = tuple(HeldOutSection.model_fields)
"""Knobs of evaluations. When to evaluate is allowed without held-out tasks: files of other programs always say it."""
HAS_OLDER_TOKENS = (
    Needs(
        "experience.replay.num_groups",
        above=0,
        reason="with algorithm.correction.importance=auto only steps that train tokens of older weights limit weights",
    )
    | Needs("rollout.max_staleness", above=0)
    | Needs("serve.mode", "online")
    | Needs("engine.weight_format", "fp8")
    | Needs("engine.kind", "vllm")
    | Needs("algorithm.correction.importance", ("token", "sequence", "none"))
)
HAS_SEVERAL_CRITIC_UPDATES = Needs(
    "trainer.num_minibatches", above=1, reason="the only update of the critic in a step moves no value before it"
) | Needs("algorithm.critic.num_epochs", above=1)
EvalDatasets = Annotated[dict[str, DatasetSection], Unused(TASK_KNOBS, "evaluations run every task unchanged")]


ADAPTER_LEARNING_RATE = 2e-5
"""Default of `trainer.learning_rate` with `model.lora`."""


class RunConfig(Section):
    """A reinforcement-learning run: model, tasks, agent, algorithm and output folder."""

    project: str = "tunesmith"
    """Folder under `checkpoint_root_dir` that groups runs; in AgentScope's form of `tune` the default is AgentScope."""
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
    save_interval_s: float | None = Field(default=300.0, gt=0)
    """Seconds after which the end of a step saves a checkpoint, counted from the one before; the next one replaces
    it. null saves by steps only."""
    keep_checkpoints: int | None = Field(default=None, ge=1)
    """Number of newest checkpoints kept on disk; null keeps all."""
    keep_best: KeepBestSection | None = None
    """Also keep the checkpoint with the best evaluation, as `best` in the run folder; null does not."""
    early_stopping: EarlyStoppingSection | None = None
    """End the run once a metric no longer improves; null runs all steps."""
    callbacks: Annotated[CallbacksSection, Unused(("on_evaluation",), unless=HELD_OUT)] = CallbacksSection()
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
    algorithm: Annotated[
        AlgorithmSection,
        Unused(("correction.cap", "correction.floor"), unless=HAS_OLDER_TOKENS),
        Unused(("critic.clip_range",), unless=HAS_SEVERAL_CRITIC_UPDATES),
    ] = AlgorithmSection()
    experience: ExperienceSection = ExperienceSection()
    """Processing of groups between judge and trainer."""
    engine: EngineSection = EngineSection()
    rollout: RolloutSection = RolloutSection()
    serve: ServeSection | None = None
    """The server of `tunesmith serve`; other commands that train refuse it."""
    trainer: TrainerSection = TrainerSection()
    evaluation: Annotated[EvaluationSection, Unused(EVALUATION_KNOBS, unless=HELD_OUT)] = EvaluationSection()
    monitor: MonitorSection = MonitorSection()
    cluster: ClusterSection = ClusterSection()
    """Ranks that run and train the tasks of a step together."""

    @model_serializer(mode="wrap")
    def _write(self, write: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """Run folders and digests hold the learning rate itself, which later defaults do not change."""
        values: dict[str, Any] = write(self)
        if "trainer" in values and not info.exclude_unset:
            values["trainer"]["learning_rate"] = self.learning_rate
        return values

    _add_tasks = model_validator(mode="before")(add_environment_tasks)

    @model_validator(mode="after")
    def _check_sections(self) -> Self:
        for knob, section in (("early_stopping", self.early_stopping), ("keep_best", self.keep_best)):
            if section is not None:
                sets, interval_steps = self.eval_datasets, self.evaluation.interval_steps
                check_metric_name(knob, section.metric, eval_sets=sets, interval_steps=interval_steps)
        refuse_dropout(self.model.lora, "reinforcement learning must train the function that it samples from")
        for conflict in list_conflicts(self):
            raise ValueError(conflict)
        return self

    @property
    def learning_rate(self) -> float:
        """The peak learning rate: `trainer.learning_rate`, or the default of what is trained."""
        is_default = self.trainer.learning_rate is None and self.model.lora is not None
        return ADAPTER_LEARNING_RATE if is_default else self.trainer.peak_learning_rate

    @property
    def is_online(self) -> bool:
        """Whether rollouts are live conversations instead of tasks."""
        return self.serve is not None and self.serve.mode == "online"

    @property
    def training_sets(self) -> dict[str, DatasetSection]:
        """The training sets by the name used in their tasks' ids."""
        return self.train_datasets if self.train_dataset is None else {"train": self.train_dataset}

    @property
    def training_knobs(self) -> dict[str, str]:
        """The name of each training set in the run file."""
        is_single = self.train_dataset is not None
        return {name: "train_dataset" if is_single else f"train_datasets.{name}" for name in self.training_sets}


def list_conflicts(config: RunConfig) -> Iterator[str]:
    """What is wrong with settings of different sections that do not work together, one sentence each."""
    algorithm, cluster, engine, model = config.algorithm, config.cluster, config.engine, config.model
    rollout, trainer, num_ranks = config.rollout, config.trainer, cluster.num_workers or 1
    for key, name in (("project", config.project), ("name", config.name)):
        if name is not None and not name.isprintable():
            yield f"{key}={name!r} names a folder: it must be one line without control characters"
    if config.train_dataset is not None and config.train_datasets:
        yield "train_dataset and train_datasets are both given: put every set in train_datasets"
    if num_ranks > algorithm.batch_size:
        yield (
            f"algorithm.batch_size={algorithm.batch_size} is smaller than cluster.num_workers={num_ranks}, and a task "
            "runs on one rank: raise the batch size, or use fewer ranks"
        )
    if cluster.has_sharded_gradients and trainer.has_row_graphs:
        yield "cluster.has_sharded_gradients and trainer.has_row_graphs exclude each other: set one"
    if cluster.sampling_ranks and not rollout.max_staleness:
        yield (
            f"cluster.sampling_ranks={cluster.sampling_ranks} needs rollout.max_staleness of 1 or more: samplers "
            "continue while the other ranks train, so tokens are one step old when they are trained; set "
            "rollout.max_staleness=1"
        )
    if engine.weight_format == "fp8" and model.lora is not None:
        yield "engine.weight_format=fp8 copies whole weights, not adapters: leave it out with model.lora"
    if engine.kind == "vllm" and rollout.branching is not None:
        yield "rollout.branching needs entropies, which engine.kind=vllm does not return: remove one"
    if engine.kind == "vllm" and trainer.routing_replay:
        yield "trainer.routing_replay needs engine.kind=tunesmith: vLLM returns no experts; remove one"
    if engine.kind == "vllm" and rollout.max_staleness:
        yield "rollout.max_staleness needs engine.kind=tunesmith: requests of vLLM end with the step"
    if config.serve is not None:
        yield from list_serve_conflicts(config, config.serve, num_ranks)
    if model.numerics == "exact":
        yield from list_exact_conflicts(config)
    if cluster.has_sharded_weights:
        yield from list_sharding_conflicts(config)
    if rollout.branching is not None:
        yield from list_branching_conflicts(rollout, rollout.branching, algorithm.group_size, model.temperature)
    if rollout.max_staleness:
        yield from list_staleness_conflicts(config, rollout.max_staleness)


def list_serve_conflicts(config: RunConfig, serve: ServeSection, num_ranks: int) -> Iterator[str]:
    """Why the run cannot be trained on the work of external programs."""
    if config.cluster.launcher == "ray":
        yield "tunesmith serve with cluster.launcher=ray: workers reach the ranks of one host only; leave out launcher"
    if serve.mode == "online" and num_ranks > 1:
        yield (
            f"serve.mode=online with {num_ranks} ranks: live conversations run on one rank only; leave out "
            "cluster.num_workers"
        )
    if serve.public_url is not None and "{rank}" not in serve.public_url and num_ranks > 1:
        yield (
            f"serve.public_url={serve.public_url!r} is one address for {num_ranks} ranks, each of which serves its "
            "own model endpoint: write {rank} where the address has the number of the rank"
        )
    if config.rollout.branching is not None:
        yield "rollout.branching with tunesmith serve: workers in other processes cannot be rerun from a branch point"


def list_sharding_conflicts(config: RunConfig) -> Iterator[str]:
    own_engine = "engine.kind=tunesmith, which samples from whole weights (set engine.kind=vllm)"
    others = {
        own_engine: config.engine.kind != "vllm",
        "model.lora": config.model.lora is not None,
        "model.residual_dtype=float32": config.model.residual_dtype == "float32",
        "trainer.has_row_graphs": bool(config.trainer.has_row_graphs),
        "rollout.assignment=balanced": config.rollout.assignment == "balanced",
        "algorithm.reference_refresh_steps": config.algorithm.reference_refresh_steps is not None,
    }
    for setting, is_so in others.items():
        if is_so:
            yield f"cluster.has_sharded_weights does not work with {setting}: remove one of them"


def list_exact_conflicts(config: RunConfig) -> Iterator[str]:
    model, engine = config.model, config.engine
    others = {
        f"model.temperature={model.temperature:g}, but needs 1": model.temperature != 1,
        "model.top_p, top_k or min_p": model.top_p < 1 or model.top_k > 0 or model.min_p > 0,
        "model.lora.quantization": model.lora is not None and model.lora.quantization != "none",
        "engine.kind=vllm": engine.kind == "vllm",
        f"engine.cuda_decode={engine.cuda_decode}": engine.cuda_decode != "compiled",
        f"engine.weight_format={engine.weight_format}": engine.weight_format != "model",
        "engine.max_num_seqs=1": engine.max_num_seqs == 1,  # products of a single row have other bits
        "trainer.has_compiled_layers=false": not config.trainer.has_compiled_layers,
        "cluster.has_sharded_weights": config.cluster.has_sharded_weights,
    }
    for setting, is_so in others.items():
        if is_so:
            yield f"model.numerics=exact does not work with {setting}: change one of them"


def list_branching_conflicts(
    rollout: RolloutSection, branching: BranchingSection, group_size: int, temperature: float
) -> Iterator[str]:
    if rollout.assignment == "balanced":
        yield "rollout.assignment=balanced with rollout.branching: set rollout.assignment=plan, or leave out branching"
    if group_size < 2:
        yield f"rollout.branching needs algorithm.group_size of at least 2; it is {group_size}"
    if branching.initial_rollouts is not None and branching.initial_rollouts >= group_size:
        yield (
            f"rollout.branching.initial_rollouts={branching.initial_rollouts} leaves no branch in a group of "
            f"algorithm.group_size={group_size}: lower it, or leave out rollout.branching"
        )
    if temperature == 0:
        yield "rollout.branching with model.temperature=0: a branch would repeat its parent; raise the temperature"


def list_staleness_conflicts(config: RunConfig, max_staleness: int) -> Iterator[str]:
    replay, refused = config.experience.replay, f"rollout.max_staleness={max_staleness} does not work with"
    if config.rollout.branching is not None:
        yield f"{refused} rollout.branching: a branch would continue a rollout of other weights; leave one of them out"
    if config.serve is not None:
        yield f"{refused} serve: workers run each task to its end; leave max_staleness out"
    if replay.num_groups and replay.max_staleness > max_staleness:
        yield (
            f"{refused} experience.replay.max_staleness={replay.max_staleness}: replayed groups would be older; set it "
            f"to {max_staleness} or less"
        )
