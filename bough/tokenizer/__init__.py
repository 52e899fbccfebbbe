"""Text to tokens and back: tokenizers, chat templates, incremental decoding, stop strings. Torch-free."""
