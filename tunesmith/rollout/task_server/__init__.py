"""Gives the tasks of a run to workers in other processes and receives their rewards."""
