"""NNX modules."""
