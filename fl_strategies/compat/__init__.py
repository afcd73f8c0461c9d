"""What legacy parts of Flower need; loaded where it is used."""
