"""Rows to 8-bit floats with a scale each, alone or together with what produces the rows."""
