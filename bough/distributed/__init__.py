"""Topology, process groups and collectives: which part of the model lives here, and how the parts meet."""
