"""``make demo``: FedADMM against FedAvg on 100 clients that hold two label-sorted shards each.

Runs ``flwr run .`` (Flower's Ray simulation) once per algorithm on scikit-learn's digits, and ends
with a table. Nothing it started stays running.
"""

from datetime import datetime
from pathlib import Path

from simulations.compare import main

if __name__ == "__main__":
    folder = Path.home() / "fl-strategies-results" / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    main(
        "--engine ray --dataset digits --partition shards --clients 100 --rounds 30 --seed 1"
        f" --algorithms fedadmm,fedavg --output {folder}".split()
    )
