"""Ringfence: run code that nobody trusts, in a place it cannot leave."""

__version__ = "0.1.0"
