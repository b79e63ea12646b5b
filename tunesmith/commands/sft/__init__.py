"""Supervised fine-tuning and preference training (DPO, KTO, ORPO, SimPO): training on rows, without sampling."""
