"""Forbids tokens: what a grammar does not allow must not be sampled."""
