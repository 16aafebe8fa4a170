"""The modules of `train_images.py`, in reading order: data, model."""
