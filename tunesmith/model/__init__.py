"""What a model is to this package: loading, attention, logits, rendering. Rooms import the files they need."""
