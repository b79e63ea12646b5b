"""Every knob, once: `run.py` holds those of training runs, the other files those of the stages around them."""

from __future__ import annotations

from tunesmith.config.run import (
    AlgorithmSection,
    AuxiliaryModelSection,
    DatasetSection,
    EngineSection,
    EvaluationSection,
    ExperienceSection,
    ModelSection,
    MonitorSection,
    OperatorSection,
    ReplaySection,
    RolloutSection,
    RunConfig,
    SelectorSection,
    TrainerSection,
)
from tunesmith.config.section import Section

__all__ = [
    "AlgorithmSection",
    "AuxiliaryModelSection",
    "DatasetSection",
    "EngineSection",
    "EvaluationSection",
    "ExperienceSection",
    "ModelSection",
    "MonitorSection",
    "OperatorSection",
    "ReplaySection",
    "RolloutSection",
    "RunConfig",
    "Section",
    "SelectorSection",
    "TrainerSection",
]
