"""Recurrent layers: of each head a matrix in which keys find values, and a short convolution over a row's tokens."""
