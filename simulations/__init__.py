"""The Flower App: data sets, partitions, models, and the two apps that `flwr run .` starts."""
