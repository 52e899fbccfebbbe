"""Pages of a KV cache to lines and back."""
