"""The parts of `train_lm.py`, in reading order: corpus, model, options, checkpoint, report."""
