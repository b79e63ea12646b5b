"""Supervised fine-tuning and learning from preferences."""
