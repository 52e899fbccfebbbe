"""Root-mean-square normalisation, with the residual addition that always precedes it."""
