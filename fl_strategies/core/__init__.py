"""The maths and records: no Flower, no torch."""
