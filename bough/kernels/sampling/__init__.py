"""One token for each row of a batch of logits: greedy, or drawn at random within top-k, top-p and min-p."""
