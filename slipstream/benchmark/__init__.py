"""Measuring instruments: `slipstream bench ...`. They use the public `LLM`, never the rooms below it."""
