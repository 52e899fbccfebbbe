"""The inputs of a decode step, made on the device from what it knows of each row."""
