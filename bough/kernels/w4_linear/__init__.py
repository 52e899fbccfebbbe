"""Products with weights of 4 bits in groups: bound by reading the weight, a quarter of what 16 bits take."""
