"""FP8 through XLA: its own f8 dots, which call cuBLASLt on CUDA."""
