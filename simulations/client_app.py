"""The ClientApp of this Flower App."""

from simulations.worker import app

__all__ = ["app"]
