"""What `gpu.py` and `tune_gpu.py` check and time on a GPU."""
