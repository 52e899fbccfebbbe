"""Every struct that crosses a process, one tagged union per receiver, and the channels that carry them.

Four messages tell the whole story of a request: `Generate` (client → scheduler), `Open` and `StepOutput` (scheduler →
detokenizer), `Deltas` (detokenizer → client). They are msgpack, never pickle: bytes from a socket cannot run code.
"""
