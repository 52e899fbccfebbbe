"""The blocks that models are composed of, each holding this rank's share of its weights.

Layers are plain objects: they allocate their tensors when made, say through `slots` which checkpoint tensors fill them,
and are called. They hold no state of a request; what a step needs comes as an argument.
"""
