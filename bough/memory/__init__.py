"""Where keys and values live: `tree` accounts for page numbers, `pools` holds the tensors they point into."""
