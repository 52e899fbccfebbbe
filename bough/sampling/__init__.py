"""Logits to tokens and logprobs, for a whole batch at once.

`state` holds what each row asked for, `sampler` runs one step (`adjust`, `masks` and, on CPUs, `filters`; kernels on
devices), `logprobs` reports on the model's own distribution. The host knows from flags which of these a batch needs;
the device is never read to decide. `slots` are storage that the others share.
"""
