"""Grouped matmuls: each group of rows is multiplied by its own matrix."""
