"""Triton device code and its launchers. Imported on use only, so that machines without Triton can import the ops."""
