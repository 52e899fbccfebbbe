"""Stand-ins for the engine's parts: fast, exact, and able to notice what the real ones would silently get wrong."""
