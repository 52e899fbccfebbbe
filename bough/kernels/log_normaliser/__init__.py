"""What turns logits into logprobs, for each row of a batch."""
