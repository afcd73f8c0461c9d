"""What both halves read and write of a message.

``clients`` imports this package and ``core``, never ``server``.
"""
