"""Linen modules."""
