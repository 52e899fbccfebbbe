"""Latent attention: keys and values of all heads as products of one vector for each token."""
