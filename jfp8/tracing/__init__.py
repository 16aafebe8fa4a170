"""The JAX version and device that a program is traced for, and notes for reports."""
