"""Which experts a token is sent to, and what each of them weighs."""
