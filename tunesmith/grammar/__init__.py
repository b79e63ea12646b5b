"""Grammars of replies: JSON schemas, regular expressions, choices and tool calls, and the tokens that they allow."""
