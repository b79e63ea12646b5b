"""Tools that agents call: plain functions from text to text; what the model did wrong comes back as an observation."""
