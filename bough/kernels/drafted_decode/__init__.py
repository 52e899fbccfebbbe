"""Both ends of a decode step with drafts, on the device: what its rows compute, and how many drafts hold."""
