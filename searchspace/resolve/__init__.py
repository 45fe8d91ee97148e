"""Resolution: what a plan means for a graph, before any instruction exists.

``resolve(graph, plan)`` checks that the plan is legal and derives, for every operator of every
stage, the layouts of its inputs and outputs; for every edge the *adapter* between producer and
consumer, forward and backward; for every parameter where it is stored, accumulated and updated; and
the communication-free *segments*.  The cost model prices a resolution, the materializer turns it
into a program: both see the same communication.
"""

from searchspace.resolve.legality import can_replicate, layout_problem, split_problem
from searchspace.resolve.resolution import (
    EVERYWHERE,
    Adapter,
    Kind,
    ParameterHome,
    Resolution,
    Segment,
    Site,
    StageIndex,
    Version,
)
from searchspace.resolve.resolver import resolve

__all__ = [
    "EVERYWHERE",
    "Adapter",
    "Kind",
    "ParameterHome",
    "Resolution",
    "Segment",
    "Site",
    "StageIndex",
    "Version",
    "can_replicate",
    "layout_problem",
    "resolve",
    "split_problem",
]
