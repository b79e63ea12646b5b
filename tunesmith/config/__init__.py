"""Every knob, once: `run.py` holds those of training runs, the other files those of the stages around them."""

from __future__ import annotations

from tunesmith.config.correction import AdaptiveKlSection, CorrectionSection, MaskSection
from tunesmith.config.evaluation import EvalConfig
from tunesmith.config.experience import ExperienceSection, OperatorSection, ReplaySection
from tunesmith.config.export import ExportSection
from tunesmith.config.extra_models import CriticSection, ExpertSection, TeacherSection
from tunesmith.config.finetune import (
    DemonstrationSection,
    FinetuneConfig,
    FinetuneTrainerSection,
    OfflineConfig,
)
from tunesmith.config.lora import LoraSection
from tunesmith.config.model import AuxiliaryModelSection, ModelSection, ServedModelSection
from tunesmith.config.pipeline import FunctionStage, PipelineConfig
from tunesmith.config.preference import PreferenceConfig, PreferenceTrainerSection
from tunesmith.config.prepare import (
    ContaminationSection,
    ParaphraseSection,
    PassRateSection,
    PrepareSection,
    SourceSection,
    TokensSection,
    TriedModelSection,
)
from tunesmith.config.run import (
    AlgorithmSection,
    DatasetSection,
    EngineSection,
    EvaluationSection,
    HeldOutSection,
    MonitorSection,
    RolloutSection,
    RunConfig,
    SelectorSection,
    TrainerSection,
)
from tunesmith.config.section import Section

__all__ = [
    "AdaptiveKlSection",
    "AlgorithmSection",
    "AuxiliaryModelSection",
    "ContaminationSection",
    "CorrectionSection",
    "CriticSection",
    "DatasetSection",
    "DemonstrationSection",
    "EngineSection",
    "EvalConfig",
    "EvaluationSection",
    "ExperienceSection",
    "ExpertSection",
    "ExportSection",
    "FinetuneConfig",
    "FinetuneTrainerSection",
    "FunctionStage",
    "HeldOutSection",
    "LoraSection",
    "MaskSection",
    "ModelSection",
    "MonitorSection",
    "OfflineConfig",
    "OperatorSection",
    "ParaphraseSection",
    "PassRateSection",
    "PipelineConfig",
    "PreferenceConfig",
    "PreferenceTrainerSection",
    "PrepareSection",
    "ReplaySection",
    "RolloutSection",
    "RunConfig",
    "Section",
    "SelectorSection",
    "ServedModelSection",
    "SourceSection",
    "TeacherSection",
    "TokensSection",
    "TrainerSection",
    "TriedModelSection",
]
