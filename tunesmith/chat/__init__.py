"""Text of a conversation and its token ids: messages, chat templates, reply parsers, detokenizing."""
