"""Convert conversations and preference pairs to samples."""
