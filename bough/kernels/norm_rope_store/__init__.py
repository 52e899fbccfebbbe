"""Head norms, rotation and the store of keys and values: all between the projection and attention."""
