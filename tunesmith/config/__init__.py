"""Config classes: `run.py` for reinforcement-learning runs, the other files for their sections and for other
commands."""

from __future__ import annotations

from tunesmith.config.correction import AdaptiveKlSection, CorrectionSection, MaskSection
from tunesmith.config.evaluation import EvalConfig
from tunesmith.config.experience import ExperienceSection, OperatorSection, ReplaySection
from tunesmith.config.export import ExportSection
from tunesmith.config.extra_models import CriticSection, ExpertSection, TeacherSection
from tunesmith.config.lora import LoraSection
from tunesmith.config.model import AuxiliaryModelSection, ModelSection, ServedModelSection
from tunesmith.config.pipeline import FunctionStage, PipelineConfig
from tunesmith.config.preference import PreferenceConfig, PreferenceTrainerSection
from tunesmith.config.prepare import (
    ContaminationSection,
    ParaphraseSection,
    PassRateModelSection,
    PassRateSection,
    PrepareSection,
    SourceSection,
    TokensSection,
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
from tunesmith.config.sft import (
    ConversationDataSection,
    OfflineConfig,
    SftConfig,
    SftTrainerSection,
)
from tunesmith.config.tools import PythonToolSection

__all__ = [
    "AdaptiveKlSection",
    "AlgorithmSection",
    "AuxiliaryModelSection",
    "ContaminationSection",
    "ConversationDataSection",
    "CorrectionSection",
    "CriticSection",
    "DatasetSection",
    "EngineSection",
    "EvalConfig",
    "EvaluationSection",
    "ExperienceSection",
    "ExpertSection",
    "ExportSection",
    "FunctionStage",
    "HeldOutSection",
    "LoraSection",
    "MaskSection",
    "ModelSection",
    "MonitorSection",
    "OfflineConfig",
    "OperatorSection",
    "ParaphraseSection",
    "PassRateModelSection",
    "PassRateSection",
    "PipelineConfig",
    "PreferenceConfig",
    "PreferenceTrainerSection",
    "PrepareSection",
    "PythonToolSection",
    "ReplaySection",
    "RolloutSection",
    "RunConfig",
    "Section",
    "SelectorSection",
    "ServedModelSection",
    "SftConfig",
    "SftTrainerSection",
    "SourceSection",
    "TeacherSection",
    "TokensSection",
    "TrainerSection",
]
