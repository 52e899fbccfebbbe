"""A fleet under load while one thing after another breaks: `python -m tests.system.chaos --minutes 10`."""
