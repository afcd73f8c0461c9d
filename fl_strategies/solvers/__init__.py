"""Local solvers: their step rules, each written once, and the settings of ``local``.

A step rule is arithmetic of vectors: it runs on NumPy arrays, torch tensors and stacks.
"""
