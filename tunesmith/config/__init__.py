"""Config classes: `run.py` for reinforcement-learning runs, the other files for their sections and for other
commands."""

from __future__ import annotations

from tunesmith.config.algorithm import AdaptiveKlSection, AlgorithmSection, CorrectionSection, MaskSection
from tunesmith.config.callbacks import CallbacksSection, EarlyStoppingSection, KeepBestSection, PatienceSection
from tunesmith.config.cluster import ClusterSection
from tunesmith.config.evaluation import EvalConfig
from tunesmith.config.experience import ExperienceSection, OperatorSection, ReplaySection
from tunesmith.config.export import ExportSection
from tunesmith.config.extra_models import CriticSection, ExpertSection, TeacherSection
from tunesmith.config.model import AuxiliaryModelSection, LoraSection, ModelSection, ServedModelSection
from tunesmith.config.pipeline import (
    EvalStage,
    ExportStage,
    FunctionStage,
    PipelineConfig,
    PreferStage,
    PrepareStage,
    RlStage,
    SftStage,
)
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
    BehaviorSection,
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
    "BehaviorSection",
    "CallbacksSection",
    "ClusterSection",
    "ContaminationSection",
    "ConversationDataSection",
    "CorrectionSection",
    "CriticSection",
    "DatasetSection",
    "EarlyStoppingSection",
    "EngineSection",
    "EvalConfig",
    "EvalStage",
    "EvaluationSection",
    "ExperienceSection",
    "ExpertSection",
    "ExportSection",
    "ExportStage",
    "FunctionStage",
    "HeldOutSection",
    "KeepBestSection",
    "LoraSection",
    "MaskSection",
    "ModelSection",
    "MonitorSection",
    "OfflineConfig",
    "OperatorSection",
    "ParaphraseSection",
    "PassRateModelSection",
    "PassRateSection",
    "PatienceSection",
    "PipelineConfig",
    "PreferStage",
    "PreferenceConfig",
    "PreferenceTrainerSection",
    "PrepareSection",
    "PrepareStage",
    "PythonToolSection",
    "ReplaySection",
    "RlStage",
    "RolloutSection",
    "RunConfig",
    "Section",
    "SelectorSection",
    "ServedModelSection",
    "SftConfig",
    "SftStage",
    "SftTrainerSection",
    "SourceSection",
    "TeacherSection",
    "TokensSection",
    "TrainerSection",
]
