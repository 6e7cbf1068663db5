"""The device side of the loop: slot state, the frame, results."""
