"""What the executor costs beside PyTorch's own ways to run the same computation."""
