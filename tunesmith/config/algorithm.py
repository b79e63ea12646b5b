"""Knobs of the algorithm: advantages, loss, KL, off-policy correction, and the extra models that some need."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tunesmith.config.section import DataSection, LearningRate, Needs, Section


class CriticSection(Section):
    """The value model of ppo, with its own weights and optimizer."""

    path: str | None = None
    """Model that initializes the critic's body; it must have the policy's vocabulary. null uses the policy's model."""
    learning_rate: LearningRate = 1e-5
    """Learning rate of the critic's AdamW; constant."""
    warmup_steps: int = Field(default=0, ge=0)
    """Initial steps that train only the critic; raise it if an untrained critic degrades a good policy."""
    num_epochs: int = Field(default=1, ge=1)
    """Critic updates per policy update, on the same tokens."""
    clip_range: float | None = Field(default=0.2, gt=0)
    """Value clipping: maximum change of a value from the one at the start of the step. null disables clipping."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Maximum gradient norm of the critic; larger gradients are scaled down."""


class TeacherSection(Section):
    """The frozen model that distillation imitates."""

    path: str
    """Folder or hub id of a causal language model with the policy's vocabulary."""


class ExpertSection(DataSection):
    """Expert demonstrations that are mixed into each update."""

    path: str
    """Folder of jsonl, json, csv or parquet files, one such file, or a hub id; rows have `messages` and
    optionally `tools`."""
    ratio: float = Field(default=0.5, gt=0, lt=1)
    """Share of demonstrations among the sequences of a step in which every rollout is trained."""


class MaskSection(Section):
    """Masks tokens whose importance weight (policy at the start of the step over sampler) is out of bounds."""

    level: Literal["token", "sequence", "geometric"]
    """Importance weight compared with the limits: of each token, the product over its sequence, or the geometric mean
    over its sequence."""
    low: float = Field(ge=0, allow_inf_nan=False)
    """Lower limit; about 0.5 for tokens, 0.999 for geometric means of a large model."""
    high: float = Field(gt=0)
    """Upper limit; about 5 for tokens, 1.001 for geometric means of a large model."""

    @model_validator(mode="after")
    def _check_order(self) -> MaskSection:
        if self.low >= self.high:
            raise ValueError(f"low={self.low} must be below high={self.high}")
        return self


class CorrectionSection(Section):
    """Correction for tokens that were not sampled by the policy at the start of the step."""

    importance: Literal["auto", "none", "token", "sequence"] = "auto"
    """Multiply losses by truncated importance weights, per token or per sequence; costs one extra forward per step,
    except with token weights and a single update per step. auto uses token weights for on-policy algorithms in steps
    that train tokens of older weights (replay, `rollout.max_staleness`), and with `engine.weight_format=fp8` or
    `engine.kind=vllm`."""
    cap: float = Field(default=2.0, ge=1)
    """Upper bound of importance weights. With `importance: auto` only steps that train tokens of older weights, or of
    another sampler, limit weights."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """Lower bound of importance weights; set it (0.5 is usual) so that tokens that the policy has made improbable since
    sampling keep part of their gradient. 0: no lower bound. Used where `cap` is."""
    mask: MaskSection | None = None
    """Exclude tokens whose importance weight is out of bounds from the policy loss; null keeps all."""
    negative_sequence_delta: float | None = Field(default=None, ge=0)
    """Exclude sequences with negative mean advantage if their mean log-ratio of sampler to policy exceeds this; 0.1 is
    usual. null keeps all."""


class AdaptiveKlSection(Section):
    """Adapts the KL coefficient so that the KL approaches a target."""

    target: float = Field(gt=0, allow_inf_nan=False)
    """Target of the mean KL to the starting model, in nats per token."""
    horizon: int = Field(default=10000, ge=1)
    """Trajectories over which the coefficient changes by at most 20 %; lower it to react faster, down to the
    trajectories of an update."""


WITH_KL = Needs("kl_coef", above=0)


class AlgorithmSection(Section):
    """Advantages, loss, KL and batch size."""

    algorithm_type: str = "multi_step_grpo"
    """Algorithm; `tunesmith config --algorithms` lists the names and their arguments."""
    group_size: int = Field(default=8, ge=1)
    """Rollouts per task in a step; 1 suffices only for algorithms that do not compare rollouts of a task. Raise it if
    many groups have equal rewards."""
    batch_size: int = Field(default=32, ge=1)
    """Tasks per step; raise it for less noisy updates."""
    advantage: str | None = None
    """Own advantage function, as `module:function` or `file.py:function`, in place of that of `algorithm_type`, whose
    other parts stay; null uses the algorithm's."""
    loss: str | None = None
    """Own loss function, in the same form; null uses the algorithm's."""
    advantage_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the advantage function that differ from its defaults."""
    loss_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the loss function that differ from its defaults."""
    terms_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the function that computes per-sequence terms (returns, preference pairs, sequence ratios) between
    scoring and loss, if they differ from its defaults."""
    loss_aggregation: (
        Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None
    ) = None
    """Weighting of token losses in the batch loss; null uses the algorithm's default."""
    norm_length: int | None = Field(default=None, ge=1)
    """Divisor, in tokens, of a sequence's summed loss in seq-mean-token-sum-norm (dr_grpo). Set it to the longest
    expected answer, so that the loss scale does not depend on the context length. null uses `model.max_model_len`."""
    kl_coef: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Coefficient of the KL to the starting model; raise it if the policy drifts too far. Above 0 a frozen copy of the
    model is loaded, except with `model.lora`, where the base weights are the reference."""
    kl_estimator: Annotated[Literal["k1", "k2", "k3", "abs", "corrected_k3"], WITH_KL] = "k2"
    """Estimator of the KL (Schulman, 2020); corrected_k3 weights k3 by the ratio of policy to sampler."""
    kl_adaptive: Annotated[AdaptiveKlSection | None, WITH_KL] = None
    """Adapt the KL coefficient, starting from `kl_coef`, to reach a target KL; null keeps it constant."""
    reference_refresh_steps: int | None = Field(default=None, ge=1)
    """Steps after which the reference of the KL becomes the current policy, again and again; null keeps the starting
    model. Set it in long runs, where the KL to the starting model stops further learning."""
    correction: CorrectionSection = CorrectionSection()
    """Importance weights and masks for off-policy tokens."""
    top_entropy_fraction: float = Field(default=1.0, gt=0, le=1)
    """Compute the policy loss only on this fraction of the tokens of an update, those of highest entropy; 0.2 for long
    chains of thought. Below 1 it costs one extra forward per update. 1 trains all tokens."""
    entropy_coef: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Coefficient of the entropy bonus; raise it slightly (0.001) if answers lose diversity too early."""
    critic: CriticSection = CriticSection()
    """Critic of ppo."""
    teacher: TeacherSection | None = None
    """Teacher model of on_policy_distill and jsd."""
    expert: ExpertSection | None = None
    """Expert demonstrations of mix and mix_chord."""
