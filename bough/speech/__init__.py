"""From a recording to its text: sound to features, windows with voice in them, and what the engine writes of each."""
