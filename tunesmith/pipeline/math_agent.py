"""Stable import path of the calculator agent for run files: `tunesmith.pipeline.math_agent:calculator_agent`."""

from tunesmith.commands.prepare.calculator_agent import calculator_agent

__all__ = ["calculator_agent"]
