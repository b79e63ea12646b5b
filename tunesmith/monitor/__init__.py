"""Sinks of a run's metrics: metrics.jsonl, trackers, and the console."""

from __future__ import annotations
