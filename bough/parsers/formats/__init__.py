"""The ways in which models write calls, one small file for each family. `bough.parsers.registry` knows their names."""
