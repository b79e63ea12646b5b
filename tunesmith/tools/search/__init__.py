"""The search tool: passages from a search server, an index in this process, or the web."""
