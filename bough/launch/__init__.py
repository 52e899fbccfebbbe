"""Builds the parts of an engine, wires them, and starts and watches its processes.

`engine` is the offline API; `supervisor` owns the child processes; `child` is what runs in them.
"""
