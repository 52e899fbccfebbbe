"""Both ends of decode steps, on the device: what their rows compute, and how many drafts hold."""
