"""Causal attention of ragged chunks over a cached prefix and the chunk's own new tokens."""
