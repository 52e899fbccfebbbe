"""Attention of ragged rows over a paged key/value cache."""
