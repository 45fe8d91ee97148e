"""The search: strategies per operator, stages, micro-batches, memory."""

from autoplan.search.context import SearchOptions
from autoplan.search.search import search_plan
from autoplan.search.uniform import named_plan

__all__ = ["SearchOptions", "named_plan", "search_plan"]
