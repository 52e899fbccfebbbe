"""Products of many rows with a weight: the vendor's library, by the algorithm that was measured to be fastest."""
