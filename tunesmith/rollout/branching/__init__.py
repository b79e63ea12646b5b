"""Branching rollouts: ARPO (Dong et al., 2025, arXiv:2507.19849) and AEPO's changes to it (arXiv:2510.14545)."""
