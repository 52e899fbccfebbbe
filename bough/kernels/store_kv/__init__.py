"""Writing new keys and values into their places in the cache."""
