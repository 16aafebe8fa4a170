"""FP8 for models without editing them: which layers, how, and a report of the result."""
