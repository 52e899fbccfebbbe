"""Logits to tokens and logprobs, for a whole batch at once.

`state` holds what each row asked for, `sampler` runs one step (`adjust`, `masks`, `filters`, `draw`; on devices `apart`
and kernels), `logprobs` reports on the model's own distribution. Which of these a batch needs is known on the host
beforehand, from flags; the device is never read to decide. `slots`, `batch` and `rowwise` are the tools that the others
share.
"""
