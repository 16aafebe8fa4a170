"""Products of scaled arrays, one file per backend. Leaves: no policy, no dispatch."""
