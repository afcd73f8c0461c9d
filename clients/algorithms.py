"""The client of every algorithm as a class of its name; ``algorithms.pyi`` is for type checkers."""

from clients.any_algorithm import CLIENTS

globals().update({client.__name__: client for client in CLIENTS.values()})
