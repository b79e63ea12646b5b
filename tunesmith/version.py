"""The package's version, read by the build and written into model cards."""

__version__ = "0.1.0"
