"""The search: strategies per operator, stages, micro-batches, memory."""

from autoplan.search.search import SearchOptions, search_plan
from autoplan.search.uniform import named_plan

__all__ = ["SearchOptions", "named_plan", "search_plan"]
