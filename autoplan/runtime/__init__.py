"""The runtime: executes programs, on process groups or with all ranks inside one process."""
