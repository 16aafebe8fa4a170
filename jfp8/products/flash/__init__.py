"""Attention in FP8, block by block, without an array of all scores ``[queries, keys]``."""
