"""Materialization: from a plan to programs, with every communication derived."""

from searchspace.materialize.programs import evaluation_program, forward_program, refresh_program, train_program
from searchspace.materialize.slots import optimizer_dtype

__all__ = ["evaluation_program", "forward_program", "optimizer_dtype", "refresh_program", "train_program"]
