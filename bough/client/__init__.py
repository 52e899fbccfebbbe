"""The async handle on one engine: submit, stream, abort, control.

`inputs` turns what a caller gave into requests, `outputs` gathers what comes back for one of them, `handle` connects
both to the engine's processes.
"""
