"""Stores below the host's memory: pages that outlive an engine, on disk or with a server that engines share."""
