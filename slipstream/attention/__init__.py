"""Attention: the context protocol that models call, and its torch implementations."""
