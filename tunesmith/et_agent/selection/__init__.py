"""Stages that choose questions or trajectories to train on."""
