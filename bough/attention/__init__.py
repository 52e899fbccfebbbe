"""Attention over the paged cache: what a step looks like to a back end, the back ends, and how one is chosen."""
