"""The shared vocabulary: settings, sampling parameters, finish reasons, errors, and the contract between deciding and
running.

Everything here is plain data. It imports no other room, no torch and no network, so any process may load it in a blink.
"""
