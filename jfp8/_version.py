"""The version, and nothing else: the build reads this file without importing the library."""

__version__ = "0.1.0"
