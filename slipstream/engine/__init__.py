"""The host half of the decode loop: queue, pages, prefix cache, collect. No torch. Start at `loop.py`."""
