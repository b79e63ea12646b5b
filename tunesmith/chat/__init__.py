"""Conversations as token ids and back: messages, chat templates, reply parsers, detokenization."""
