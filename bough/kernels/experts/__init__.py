"""The products of a mixture of experts: each token with its own few of many matrices."""
