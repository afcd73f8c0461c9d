"""Running clients: the bridge to Flower, their state, the in-process engine."""
