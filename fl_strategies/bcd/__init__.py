"""FedBCD and what its variants share."""
