"""Commands of ``python -m jfp8``: look at a GPU, check its kernels, measure it."""
