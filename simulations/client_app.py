"""The ClientApp of this Flower App."""

from simulations.experiment import app

__all__ = ["app"]
