"""Attention of one query per row over a paged key/value cache, split over the keys where rows are few or long."""
