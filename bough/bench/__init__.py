"""Measures Bough and other servers: data sets, load generation, reports."""
