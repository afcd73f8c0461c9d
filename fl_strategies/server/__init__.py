"""The server half: Flower's ``Strategy`` and the run."""
