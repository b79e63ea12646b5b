"""Data-parallel ranks: process groups, collectives with deadlines, and launching."""
