"""Measures Bough: load generation, single-batch timing, and the speed of single parts."""
