"""A short convolution over the tokens of each sequence, which goes on where the last step ended."""
