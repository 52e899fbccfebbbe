"""Prompts and answers on different engines: a prefill engine computes a prompt and hands its pages to a decode engine.

`wire` is what the two say to each other, `link` carries it, `prefill` and `decode` are the sides."""
