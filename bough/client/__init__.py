"""The async handle on one engine: submit, stream, abort, control."""
