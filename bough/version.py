"""The version of this package: read by the build, by `bough --version` and by the messages between processes."""

__version__ = "0.1.0"
