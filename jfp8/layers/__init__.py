"""FP8 layers for Linen and for NNX, and the mathematics that both share."""
