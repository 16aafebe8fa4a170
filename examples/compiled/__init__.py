"""Readers of compiled programs: hlo (instructions), sent (bytes between devices)."""
