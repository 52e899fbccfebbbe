"""The tensors that page numbers point into. Who owns which page is decided elsewhere, in `memory.tree`."""
