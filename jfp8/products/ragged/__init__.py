"""Products of groups of rows, each with the matrix of its group."""
