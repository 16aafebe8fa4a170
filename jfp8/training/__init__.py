"""Training steps: amax histories, gradients, data parallelism, weights in FP8."""
