"""FP8 for models that nobody edits: which layers, how, and a report of what became of them."""
