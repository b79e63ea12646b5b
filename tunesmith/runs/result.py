"""Base classes of the results that the public functions return: short text, a table in notebooks, history and model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any, ClassVar, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunesmith.errors import ModelError
from tunesmith.model.checkpoint import hidden_progress_bars
from tunesmith.model.load import load_config, load_tokenizer, loading
from tunesmith.model.source.resolve import find_model
from tunesmith.model.towers import find_auto_class
from tunesmith.monitor.metric_table import MetricTable, draw_curve
from tunesmith.runs.record import RunRecord


class Result(ABC):
    """A result that prints as a few lines and is shown as a table in notebooks."""

    __slots__ = ()

    @abstractmethod
    def list_facts(self) -> Mapping[str, str]:
        """What is shown, by its label."""

    def __repr__(self) -> str:
        facts = self.list_facts()
        width = max(map(len, facts))
        return "\n".join([type(self).__name__, *(f"  {label:<{width}}  {text}" for label, text in facts.items())])

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th style="text-align:left">{escape(label)}</th><td style="text-align:left">{escape(text)}</td></tr>'
            for label, text in self.list_facts().items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"


class ModelResult(Result):
    """A result with a model."""

    __slots__ = ()

    @property
    @abstractmethod
    def model_path(self) -> str:
        """Path of the model or adapter, which `ModelSection(path=...)` and `export()` accept; ModelError if there is
        none."""

    def model(self, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load the model and its tokenizer; `options` are arguments of `from_pretrained`."""
        return load_for_inference(self.model_path, **options)


class TrainingResult(ModelResult):
    """The result of a training: its run folder with the metrics of each step, and the trained model."""

    __slots__ = ()
    curve: ClassVar[str] = "train/loss"
    """The metric drawn in notebooks."""
    folder: Path

    @property
    def run_folder(self) -> Path:
        """The folder with config.yaml and metrics.jsonl."""
        return self.folder

    @property
    def history(self) -> MetricTable:
        """The metrics of every step, read from metrics.jsonl."""
        return RunRecord(self.run_folder).metrics.to_table()

    def _repr_html_(self) -> str:
        points = self.history.collect_points(self.curve)
        return super()._repr_html_() + draw_curve(self.curve, points)


def load_for_inference(path: str, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A plain transformers model in eval mode, and its tokenizer; an adapter folder becomes a `PeftModel` on its base.

    Unlike `load_model`, attention is that of transformers, so `generate` and every other method of the model work.
    """
    source = find_model(path)
    auto_class = find_auto_class(load_config(path, trust_remote_code=options.get("trust_remote_code", False)))
    with hidden_progress_bars(), loading(path, source):
        model = auto_class.from_pretrained(source.name_or_path, **source.kwargs, **options)
        if source.adapter is not None:
            from tunesmith.model.adapters.lora import attach_adapter  # PEFT takes seconds to import

            model = attach_adapter(model, source.adapter, is_trainable=False)
    tokenizer = load_tokenizer(path, trust_remote_code=options.get("trust_remote_code", False))
    return cast(PreTrainedModel, model.eval()), tokenizer


def require_path(path: Path | None) -> str:
    """The path of a result's model; raises ModelError if there is none."""
    if path is None:
        raise ModelError("this result has no model in Hugging Face format")
    return str(path)
