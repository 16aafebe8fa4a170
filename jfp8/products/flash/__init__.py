"""Attention in FP8, block by block: no array of ``[queries, keys]`` beyond a block."""
