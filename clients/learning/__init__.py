"""Model, data and solvers, in torch."""
