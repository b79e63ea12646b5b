"""The flywheel of ET-Agent: trajectories are rewritten, repaired, continued and judged, in iterations."""
