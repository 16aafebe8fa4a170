"""What a program is traced for: the JAX version, the device, notes for reports."""
