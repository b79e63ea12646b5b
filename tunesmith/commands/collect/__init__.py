"""`tunesmith collect`: conversations of a workflow that its judge accepts, as rows for fine-tuning."""
