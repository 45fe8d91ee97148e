"""What is shown to a person: tables, progress, comparisons."""
