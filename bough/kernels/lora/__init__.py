"""What LoRA adapters add to the products of linear layers, for rows of many adapters at once."""
