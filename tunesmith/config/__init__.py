"""Config classes: `run.py` for reinforcement-learning runs, the other files for their sections and for other
commands."""

from __future__ import annotations

from tunesmith.config.algorithm import (
    AdaptiveKlSection,
    AlgorithmSection,
    CorrectionSection,
    CriticSection,
    ExpertSection,
    MaskSection,
    TeacherSection,
)
from tunesmith.config.callbacks import CallbacksSection, EarlyStoppingSection, KeepBestSection, PatienceSection
from tunesmith.config.cluster import ClusterSection
from tunesmith.config.engine import EngineSection, VllmSection
from tunesmith.config.environment import EnvironmentSection, ToolSection
from tunesmith.config.et_agent import FlywheelConfig, ParetoSection, RftFilterSection
from tunesmith.config.evaluation import CollectConfig, EvalConfig, PassRateConfig
from tunesmith.config.experience import ExperienceSection, OperatorSection, ReplaySection
from tunesmith.config.export import ExportSection
from tunesmith.config.model import AuxiliaryModelSection, LoraSection, ModelSection, ServedModelSection
from tunesmith.config.pipeline import (
    CollectStage,
    EvalStage,
    ExportStage,
    FlywheelStage,
    FunctionStage,
    ParetoStage,
    PassRateStage,
    PreferStage,
    PrepareStage,
    RftFilterStage,
    RlStage,
    SftStage,
)
from tunesmith.config.prepare import (
    ContaminationSection,
    ParaphraseSection,
    PassRateModelSection,
    PassRateSection,
    PrepareSection,
    SourceSection,
    TokensSection,
)
from tunesmith.config.rollout import BranchingSection, RolloutSection
from tunesmith.config.run import (
    BehaviorSection,
    DatasetSection,
    EvaluationSection,
    HeldOutSection,
    MonitorSection,
    RunConfig,
    SelectorSection,
    TrainerSection,
)
from tunesmith.config.section import Section
from tunesmith.config.serve import ServeSection
from tunesmith.config.sft import (
    ConversationDataSection,
    OfflineConfig,
    PreferenceConfig,
    PreferenceTrainerSection,
    SftConfig,
    SftTrainerSection,
)
from tunesmith.config.tools import PythonToolSection

__all__ = [
    "AdaptiveKlSection",
    "AlgorithmSection",
    "AuxiliaryModelSection",
    "BehaviorSection",
    "BranchingSection",
    "CallbacksSection",
    "ClusterSection",
    "CollectConfig",
    "CollectStage",
    "ContaminationSection",
    "ConversationDataSection",
    "CorrectionSection",
    "CriticSection",
    "DatasetSection",
    "EarlyStoppingSection",
    "EngineSection",
    "EnvironmentSection",
    "EvalConfig",
    "EvalStage",
    "EvaluationSection",
    "ExperienceSection",
    "ExpertSection",
    "ExportSection",
    "ExportStage",
    "FlywheelConfig",
    "FlywheelStage",
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
    "ParetoSection",
    "ParetoStage",
    "PassRateConfig",
    "PassRateModelSection",
    "PassRateSection",
    "PassRateStage",
    "PatienceSection",
    "PreferStage",
    "PreferenceConfig",
    "PreferenceTrainerSection",
    "PrepareSection",
    "PrepareStage",
    "PythonToolSection",
    "ReplaySection",
    "RftFilterSection",
    "RftFilterStage",
    "RlStage",
    "RolloutSection",
    "RunConfig",
    "Section",
    "SelectorSection",
    "ServeSection",
    "ServedModelSection",
    "SftConfig",
    "SftStage",
    "SftTrainerSection",
    "SourceSection",
    "TeacherSection",
    "TokensSection",
    "ToolSection",
    "TrainerSection",
    "VllmSection",
]
