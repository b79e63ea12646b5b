"""Where a run's numbers go: metrics.jsonl, trackers, and the console."""

from __future__ import annotations
