"""Compatibility: AgentScope's classes and Trinity-RFT's run files, translated to Tunesmith's names."""
