"""What is done to logits before and beside sampling: bias and penalties, masks, and what makes logprobs of them."""
