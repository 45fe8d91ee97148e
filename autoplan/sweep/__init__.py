"""Sweeps: a grid of searches on Ray Tune, resumable, with one plan per cell and a table of results.

Ray is imported in this package only, and only when a sweep starts.
"""

from autoplan.sweep.cell import Cell, CellResult, run_cell
from autoplan.sweep.grid import Grid
from autoplan.sweep.sweep import SweepResult, sweep

__all__ = ["Cell", "CellResult", "Grid", "SweepResult", "run_cell", "sweep"]
