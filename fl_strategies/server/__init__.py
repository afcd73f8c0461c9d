"""The server half: the only part of the package that uses Flower."""
