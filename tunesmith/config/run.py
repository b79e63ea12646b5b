"""Every knob of a run, once: type, default, unit, and one sentence on when to change it.

A run file is one `RunConfig`. Unknown keys are errors that name the nearest known one. Validators check and raise;
they repair nothing and touch neither disk nor network. Components get their own section, never the whole.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from tunesmith.config.correction import AdaptiveKlSection, CorrectionSection
from tunesmith.config.experience import ExperienceSection, OperatorSection
from tunesmith.config.extra_models import CriticSection, ExpertSection, TeacherSection
from tunesmith.config.lora import refuse_dropout
from tunesmith.config.model import AuxiliaryModelSection, ModelSection
from tunesmith.config.section import LearningRate, NumThreads, Section, Temperature


class SelectorSection(Section):
    """Which tasks of a data set come next."""

    selector_type: str = "shuffle"
    """sequential, shuffle, random, offline_easy2hard, difficulty_based (BOTS), or your own as `module:function`."""
    seed: int | None = Field(default=None, ge=0)
    """Fixes what is drawn; None takes the run's."""
    feature_keys: tuple[str, ...] = ()
    """Fields with pass rates of reference models, from 0 to 1, for offline_easy2hard and difficulty_based."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the selector that differ from its defaults; unknown ones are errors."""


class DatasetSection(Section):
    """Where tasks come from."""

    path: str
    """Folder of jsonl, json, csv or parquet files, one such file, a folder that `save_to_disk` wrote, or a hub id."""
    name: str | None = None
    """Configuration of a data set that has several."""
    split: str | None = "train"
    """Which split to read."""
    required_fields: tuple[str, ...] = ()
    """Fields that every row must have; checked before the model loads."""
    operators: tuple[OperatorSection, ...] = ()
    """Applied once to the tasks, in order: deduplicate, length_filter, quality_score, difficulty_score, priority_order,
    paraphrase."""
    task_selector: SelectorSection = SelectorSection()
    """How training tasks are selected; evaluations try all tasks."""
    weight: float | None = Field(default=None, gt=0)
    """Share of this set among several training sets; None everywhere mixes them by size."""


class AlgorithmSection(Section):
    """How rewards become advantages and advantages become a loss."""

    algorithm_type: str = "multi_step_grpo"
    """Name in the table of algorithms; `tunesmith config --algorithms` lists them."""
    group_size: int = Field(default=8, ge=1)
    """Rollouts of each task in a step; one is enough only for algorithms that do not compare the runs of a task."""
    batch_size: int = Field(default=32, ge=1)
    """Tasks in a step."""
    advantage_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the advantage function that differ from its defaults; unknown ones are errors."""
    loss_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the loss function that differ from its defaults; unknown ones are errors."""
    terms_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the function between the two, which looks at whole sequences (returns, pairs, sequence ratios), that
    differ from its defaults; unknown ones are errors."""
    loss_aggregation: (
        Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None
    ) = None
    """How token losses are weighed in the batch's loss; None takes the algorithm's own."""
    norm_length: int | None = Field(default=None, ge=1)
    """Tokens that seq-mean-token-sum-norm (dr_grpo) divides the sum over a sequence by; set it to the longest answer
    you expect, so that another context does not scale the loss. None takes `model.max_model_len`."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the starting model; above 0 a second copy of the model is kept for reference, or with
    `model.lora` none: the weights under the adapter are the reference."""
    kl_estimator: Literal["k1", "k2", "k3", "abs", "corrected_k3"] = "k2"
    """Estimator of that KL (Schulman, 2020); corrected_k3 weighs k3 by the ratio of policy and sampler."""
    kl_adaptive: AdaptiveKlSection | None = None
    """Steer `kl_coef`, which is then where it begins, towards a KL; None keeps it."""
    correction: CorrectionSection = CorrectionSection()
    """Importance weights and masks of tokens that another policy sampled."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus; raise it a little (0.001) when answers become alike too early."""
    critic: CriticSection = CriticSection()
    """The critic of ppo."""
    teacher: TeacherSection | None = None
    """Whom on_policy_distill and jsd imitate."""
    expert: ExpertSection | None = None
    """Demonstrations that mix and mix_chord train beside the policy's own runs."""


class EngineSection(Section):
    """The sampler: how much it holds at once."""

    page_size: int = Field(default=16, ge=1)
    """Tokens in one page of the key-value cache."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Most requests decoded at once."""
    max_batched_tokens: int | None = Field(default=None, ge=1)
    """Most tokens in one forward; longer prompts are prefilled in chunks. None takes 4096, on a GPU 16384."""
    kv_cache_tokens: int | None = Field(default=None, ge=1)
    """Tokens the key-value cache holds; None takes `kv_cache_gib` worth."""
    kv_cache_gib: float | None = Field(default=None, gt=0)
    """Memory of the key-value cache in GiB when `kv_cache_tokens` is not given. None takes 2 on a CPU, and on a GPU
    what training leaves, at most what `max_num_seqs` requests of the full context need."""
    max_waiting: int = Field(default=4096, ge=1)
    """Requests that may queue; further callers wait their turn before they queue."""
    has_prefix_cache: bool = True
    """Reuse keys and values of prompts that begin alike."""
    has_packed_weights: bool = True
    """On a CPU in float32, sample from a second copy of the weights in a faster layout; turn off to save memory."""
    cuda_decode: Literal["graphs", "compiled", "eager"] = "compiled"
    """How a GPU runs the model: compiled traces its layers, runs them in fewer and larger steps, and replays captured
    steps; graphs only replays; eager does neither, for debugging."""
    decode_block: int = Field(default=16, ge=1, le=64)
    """On a GPU, tokens decoded between two looks of the host; lower it when most answers are very short."""

    @model_validator(mode="after")
    def _check_cache(self) -> Self:
        if self.kv_cache_tokens is not None and self.kv_cache_gib is not None:
            raise ValueError("kv_cache_tokens and kv_cache_gib are both given: one of them says how large the cache is")
        return self


class RolloutSection(Section):
    """How workflows run."""

    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds one workflow with its judge may take before the run of the task counts as failed."""
    max_concurrency: int = Field(default=256, ge=1)
    """Workflows in flight at once; so many threads there are for what they hand to `asyncio.to_thread`."""
    thread_patience_s: float = Field(default=0.03, ge=0)
    """Mean seconds for which the engine waits for the calls of one function in threads, so that what is sampled on a
    CPU does not depend on when they end; functions that take longer are not waited for. 0 never waits; raise it where
    runs with slower tools must repeat."""
    http_port: int | None = Field(default=None, ge=0, le=65535)
    """Also serve the models on this port of 127.0.0.1, 0 for a free one, while workflows run: then `model.base_url` and
    `model.api_key` reach a run's own model from any process and language."""
    max_body_mib: float = Field(default=8.0, gt=0)
    """MiB of the largest request that is read over HTTP; larger ones get a 413."""
    chat_model: Literal["auto", "agentscope", "openai"] = "auto"
    """What workflows get as `model`: AgentScope's OpenAIChatModel, or one that returns OpenAI completions; auto takes
    AgentScope's where it is installed."""
    has_agent_output: bool = False
    """Let AgentScope's agents print every message to the console; without it their printing is off during the run."""
    max_failure_rate: float = Field(default=0.5, ge=0, le=1)
    """The run stops with the first causes when a larger share of a step's trajectories failed."""


class TrainerSection(Section):
    """How a batch of samples becomes an update."""

    learning_rate: LearningRate = 1e-6
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """The same as a share of all steps, rounded up; give it or `warmup_steps`."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where the cosine ends, as a share of the peak."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay; norms and biases are exempt."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the two moments."""
    epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients of larger norm are scaled down to it."""
    num_minibatches: int = Field(default=1, ge=1)
    """Optimizer steps made of one batch, each on whole groups; above 1 the later ones are off-policy and clipped."""
    max_tokens_per_row: int = Field(default=16384, ge=1)
    """Tokens packed into one forward and backward; lower it when training runs out of memory."""
    logprob_chunk_tokens: int | None = Field(default=None, ge=1)
    """Positions whose logits are held at once; the result is the same. None takes as many as 0.6 GB of logits hold on a
    GPU, and 1024 on a CPU."""
    has_gradient_checkpointing: bool = False
    """Keep only layer inputs and compute the rest again in the backward: less memory, about a third more time."""
    has_compiled_layers: bool = True
    """On a GPU, fuse what lies between matrix products: faster, after half a minute of compiling that later runs find
    done; turn it off for runs of a few steps."""
    has_row_graphs: bool | None = None
    """Launch rows of like sizes at once, as CUDA graphs; the gradient is the same. None does so for models of less than
    0.4e9 parameters, for which the host otherwise bounds training. Gradients (4 bytes a trained parameter) and the
    largest row keep their memory meanwhile."""
    has_prefix_sharing: bool = True
    """Compute what samples of a group share once; the gradient is the same."""
    mismatch_warn: float = Field(default=1e-2, gt=0)
    """Mean KL between sampler and trainer above which a warning is printed."""
    mismatch_stop: float = Field(default=1.0, gt=0)
    """Mean KL between sampler and trainer above which the run stops."""

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.warmup_steps > 0 and self.warmup_ratio not in (0, type(self).model_fields["warmup_ratio"].default):
            raise ValueError(f"warmup_steps={self.warmup_steps} and warmup_ratio={self.warmup_ratio}: give one of them")
        if self.schedule == "constant" and self.min_lr_ratio > 0:
            raise ValueError(f"min_lr_ratio={self.min_lr_ratio} has no effect with schedule=constant: set it to cosine")
        return self

    @model_validator(mode="after")
    def _check_row_graphs(self) -> Self:
        if self.has_row_graphs and (self.has_gradient_checkpointing or not self.has_compiled_layers):
            raise ValueError("has_row_graphs needs has_compiled_layers, and no has_gradient_checkpointing")
        return self


class HeldOutSection(Section):
    """How held-out tasks are tried."""

    num_samples: int = Field(default=1, ge=1)
    """Rollouts of each held-out task."""
    temperature: Temperature | None = None
    """Sampling temperature of evaluations; None takes the model's."""
    max_tasks: int | None = Field(default=None, ge=1)
    """Only the first so many held-out tasks; None takes all."""


class EvaluationSection(HeldOutSection):
    """When and how held-out tasks are tried in the course of a run."""

    interval_steps: int = Field(default=100, ge=0)
    """Steps between evaluations; 0 evaluates only at the end."""
    at_start: bool = False
    """Evaluate the model before the first step."""


class MonitorSection(Section):
    """Where metrics go besides the console and metrics.jsonl."""

    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "swanlab"], ...] = ("tensorboard",)
    """Trackers that get every metric under the same name, several at once if you like; all but the first need the
    extra of their name."""
    has_progress: bool = True
    """Show live progress on the console."""
    log_interval_steps: int = Field(default=1, ge=1)
    """Steps between console lines."""
    console_metrics: tuple[str, ...] = ()
    """More metrics on a step's console line, by name or pattern: `rollout/accuracy/mean`, `rollout/*/mean`."""


class RunConfig(Section):
    """One run: what is trained, on what, how, and where the results go."""

    project: str = "AgentScope"
    """First folder under the checkpoint root."""
    name: str | None = None
    """Second folder; None makes Experiment-<YYYYmmddHHMMSS>."""
    checkpoint_root_dir: str = "./checkpoints"
    """Folder of all runs."""
    seed: int = Field(default=42, ge=0)
    """Fixes task order and every sampled token on a CPU."""
    workflow: str | None = None
    """The agent, as `module:function` or `file.py:function`; the command line needs it, `tune()` takes the function."""
    judge: str | None = None
    """The judge, in the same form; None takes the reward from the workflow."""
    num_cpu_threads: NumThreads = 1
    """Threads of torch's CPU kernels; on small virtual machines two are slower than one, on large ones try more."""
    continue_from_checkpoint: bool = False
    """Go on from the last commit of the run folder with this name; without one, start anew."""
    resume_from_step: int | None = Field(default=None, ge=0)
    """Resume from the checkpoint of this step, 0 from the beginning, where the newest one is damaged or not wanted;
    what was made after it is moved to `old-<time>/` in the run folder. None resumes from the newest."""
    total_epochs: int = Field(default=1, ge=1)
    """Passes over the training tasks."""
    total_steps: int | None = Field(default=None, ge=1)
    """Steps of the run; overrides `total_epochs`."""
    save_interval_steps: int = Field(default=100, ge=1)
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int | None = Field(default=None, ge=1)
    """Checkpoints kept on disk, the newest ones; None keeps all."""
    steps_per_file: int = Field(default=100, ge=1)
    """Steps whose rollouts are merged into one Parquet file, and whose selections into one file of JSON lines, once a
    checkpoint has committed them, so that long runs leave few files; 1 keeps one file a step."""
    model: ModelSection
    auxiliary_models: dict[str, AuxiliaryModelSection] = Field(default_factory=dict)
    train_dataset: DatasetSection | None = None
    """Training tasks."""
    train_datasets: dict[str, DatasetSection] = Field(default_factory=dict)
    """Several training sets by name, in place of `train_dataset`; their tasks are mixed."""
    eval_datasets: dict[str, DatasetSection] = Field(default_factory=dict)
    """Held-out task sets by the name their metrics carry."""
    algorithm: AlgorithmSection = AlgorithmSection()
    experience: ExperienceSection = ExperienceSection()
    """What happens to groups between the judge and the trainer."""
    engine: EngineSection = EngineSection()
    rollout: RolloutSection = RolloutSection()
    trainer: TrainerSection = TrainerSection()
    evaluation: EvaluationSection = EvaluationSection()
    monitor: MonitorSection = MonitorSection()

    @model_validator(mode="after")
    def _check_names(self) -> RunConfig:
        for key, name in (("project", self.project), ("name", self.name)):
            if name is not None and not name.isprintable():
                raise ValueError(f"{key}={name!r} names a folder: it must be one line without control characters")
        return self

    @model_validator(mode="after")
    def _check_resuming(self) -> RunConfig:
        if self.resume_from_step is not None and not self.continue_from_checkpoint:
            raise ValueError(
                f"resume_from_step={self.resume_from_step} has no effect without continue_from_checkpoint=true "
                "(--resume-from sets both)"
            )
        return self

    @model_validator(mode="after")
    def _check_training_sets(self) -> RunConfig:
        if self.train_dataset is not None and self.train_datasets:
            raise ValueError("train_dataset and train_datasets are both given: name every set in train_datasets")
        if self.train_dataset is not None and self.train_dataset.weight is not None:
            raise ValueError("train_dataset.weight has no effect on a single set; name several in train_datasets")
        return self

    @model_validator(mode="after")
    def _check_dropout(self) -> RunConfig:
        refuse_dropout(self.model.lora, "reinforcement learning must train the function that it samples from")
        return self

    @model_validator(mode="after")
    def _check_evaluation_sets(self) -> RunConfig:
        for name, dataset in self.eval_datasets.items():
            for key in ("task_selector", "weight", "operators"):
                if getattr(dataset, key) != DatasetSection.model_fields[key].default:
                    raise ValueError(f"eval_datasets.{name}.{key} has no effect: evaluations try every task as it is")
        return self

    @model_validator(mode="after")
    def _check_correction(self) -> RunConfig:
        correction, default = self.algorithm.correction, CorrectionSection().cap
        if correction.importance == "auto" and correction.cap != default and self.experience.replay.num_groups == 0:
            raise ValueError(
                f"algorithm.correction.cap={correction.cap} has no effect: with importance=auto only steps that train "
                "groups of earlier steps truncate weights; set experience.replay.num_groups, or importance=token"
            )
        return self

    @property
    def training_sets(self) -> dict[str, DatasetSection]:
        """The training sets by the name their tasks carry."""
        return self.train_datasets if self.train_dataset is None else {"train": self.train_dataset}
