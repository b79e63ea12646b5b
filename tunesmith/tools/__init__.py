"""Tools for agents: a calculator and a sandbox for Python. Errors of the model are observations."""
