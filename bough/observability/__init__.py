"""Logs and figures of a running engine; usable as no-ops."""
