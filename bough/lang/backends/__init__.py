"""Where programs run: an engine in this process, a server, or another vendor's API.

`base` says what a back end must do; each other module is one. Nothing of a vendor's SDK is imported until its back end
is made.
"""
