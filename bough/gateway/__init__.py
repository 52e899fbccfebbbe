"""The gateway: many engines behind one address, each request routed to where its prefix is already cached."""
