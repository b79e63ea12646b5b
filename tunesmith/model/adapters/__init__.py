"""Adapters: checked against their base, LoRA through PEFT, dropout."""
