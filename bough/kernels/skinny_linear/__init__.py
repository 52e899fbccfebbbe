"""Products of a few rows with a weight: what decoding is made of. Bound by reading the weight once."""
