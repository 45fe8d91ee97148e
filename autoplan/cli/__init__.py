"""The command ``autoplan``."""

from autoplan.cli.app import main

__all__ = ["main"]
