"""Quantised tensors of safetensors checkpoints, a file for each kind: which tensors belong together, and their values.

All give float32 by rows; what small integers they hold can also
be had as they are (`integers`).
"""
