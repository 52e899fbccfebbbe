"""Gated activations of the feed-forward block."""
