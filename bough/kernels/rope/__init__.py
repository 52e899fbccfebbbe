"""Rotary position embedding, applied to query and key heads."""
