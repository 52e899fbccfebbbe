"""Attention in which a token's bits do not depend on how its prompt was cut, on the cache, or on its company."""
