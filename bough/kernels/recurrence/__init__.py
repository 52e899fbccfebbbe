"""Recurrent layers: of each head a matrix in which keys find values, that decays and is added to token by token."""
