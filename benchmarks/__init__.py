"""Measurements of speed, memory and learning; README.md lists them. Run one with `python -m benchmarks.FOLDER.NAME`."""
