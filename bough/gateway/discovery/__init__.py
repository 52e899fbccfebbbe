"""Where workers come from when nobody names them: sources that say which URLs come and go."""
