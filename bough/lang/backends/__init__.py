"""Where programs run: an engine in this process, a server, or another vendor's API. `base` says what one does."""
