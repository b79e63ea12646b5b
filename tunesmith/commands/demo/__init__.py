"""The demo: fine-tuning, reinforcement learning and evaluation of the embedded pocket model."""
