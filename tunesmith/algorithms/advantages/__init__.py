"""Advantage functions."""
