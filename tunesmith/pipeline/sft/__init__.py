"""Supervised fine-tuning and preference training (DPO, KTO): training on rows, without sampling."""
