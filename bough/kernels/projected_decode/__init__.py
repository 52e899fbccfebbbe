"""Decode attention straight from the projection: head norms, rotation, storing and attention in one launch."""
