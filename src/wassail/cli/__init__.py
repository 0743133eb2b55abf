"""The command line."""

from wassail.cli.parser import main

__all__ = ["main"]
