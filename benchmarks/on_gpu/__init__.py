"""The checks and timings of `gpu.py` on a GPU."""
