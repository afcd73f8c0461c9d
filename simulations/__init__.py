"""The Flower App: data sets, partitions, models, and the two apps `flwr run .` starts."""
