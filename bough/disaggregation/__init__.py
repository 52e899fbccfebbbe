"""Prompts and answers on different engines: a prefill engine computes a prompt and hands its pages to a decode engine.

`wire` is what the two say to each other, `desks` what each side knows of the other, `link` the thread that carries it.
`prefill` and `decode` are the sides as their schedulers see them (`bough.scheduler.handover`).
"""
