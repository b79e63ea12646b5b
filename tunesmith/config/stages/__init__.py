"""Knobs of stages of a pipeline that choose data for training."""
