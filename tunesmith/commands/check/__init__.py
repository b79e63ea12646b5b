"""`tunesmith check`: runs a workflow on one task and says what would keep it from training well."""
