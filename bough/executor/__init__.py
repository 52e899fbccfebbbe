"""Runs one `BatchPlan` after another: device state by row, forward pass, sampling.

`torch_executor` puts the parts together; `device_rows` owns what the device knows of each row; `sizing` decides how
much memory the KV cache gets; `threaded` lets the host go on while a CPU computes.
"""
