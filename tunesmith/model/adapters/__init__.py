"""Adapters: compatibility checks against the base model, LoRA through PEFT, dropout."""
