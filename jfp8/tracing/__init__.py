"""What a program is traced for: the JAX at hand, the device, notes for reports."""
