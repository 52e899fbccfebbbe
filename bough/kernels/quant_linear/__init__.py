"""Products of float activations with weights that stay quantised on a CPU."""
