"""Model architectures, composed of layers. `registry` tells which exist, without loading torch."""
