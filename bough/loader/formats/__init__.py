"""Quantised tensors of safetensors checkpoints, a file for each kind: which tensors belong together, and their values.

`registry` says which kinds a quantisation method uses. All give float32 by rows; what small integers they hold can also
be had as they are (`integers`).
"""
