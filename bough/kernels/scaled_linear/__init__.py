"""Products of quantised rows with a quantised weight."""
