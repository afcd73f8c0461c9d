"""Stacked training: several clients of one process, trained as one tensor [clients, d].

Only a host (``clients.node.host``) opens this package; models, solvers and clients do not know it.
"""
