"""Grammars to token masks: what a request may say next, computed off the hot path.

Importing the room loads no back end and no torch: a back end is named by a setting and loaded by the process that
compiles. The seam to the scheduler and the edge is `interface`.
"""
