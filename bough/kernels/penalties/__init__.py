"""What a request's logit bias and penalties make of its logits, and the counts that the penalties rest on."""
