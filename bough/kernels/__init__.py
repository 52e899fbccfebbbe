"""Array-in, array-out functions: the arithmetic of the forward pass, without layers, pools or batches.

Each operation has a folder, `kernels/<op>/`, with one module per implementation; `reference` is plain torch, runs
anywhere and is what the others are compared with. References that no engine runs are in `tests/kernels/references`.
Nothing here owns state. Triton's products say `input_precision="ieee"`, which matters for float32 alone: most devices
of AMD refuse any other.
"""
