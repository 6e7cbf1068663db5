"""Logits processors and counter-based random numbers. Tensor code only, static shapes, any device."""
