"""What `gpu.py` checks and times on a GPU."""
