"""The index of sparse attention: which tokens a query attends to."""
