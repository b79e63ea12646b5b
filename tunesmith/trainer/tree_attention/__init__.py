"""Attention over packed rows of token trees, forward and backward."""
