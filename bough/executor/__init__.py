"""Runs one `BatchPlan` after another: device state by row, forward pass, sampling.

`torch_executor`, `native_executor` and `cuda_executor` are one each for a kind of device; `sizing` decides how much
memory the KV cache gets; `threaded` lets the host go on while a CPU computes.
"""
