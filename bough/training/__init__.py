"""What learns from a served model."""
