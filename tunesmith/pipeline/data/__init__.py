"""Conversations and preference pairs as samples."""
