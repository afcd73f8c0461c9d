"""The personalized models of a run, as files for ``safetensors.torch.load_file``.

    python -m simulations.lab.personalized RESULTS --client 3 --output x.safetensors
    python -m simulations.lab.personalized RESULTS --output DIR

RESULTS is the results folder of a run with a ``state-dir`` (``compare`` on engine ray makes one).
Without ``--client``, DIR gets ``client-N.safetensors`` for each client N that has a state. If the
run has checkpoints, a model is the one whose reply the server used; else it is the client's newest.
A file's metadata name the client and the round.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file

from clients import (
    DirectoryStore,
    PersonalizedModel,
    personalized_model,
    personalized_models,
)
from clients.personalized import check_promises
from simulations.config import RunConfig
from simulations.lab.command_line import Command
from simulations.population import HOW_TO_KEEP, state_folder
from simulations.problems import fresh_model


def of_run(results: Path | str, client: int | None = None) -> dict[int, PersonalizedModel]:
    """Return the personalized models of a run's clients, or of one ``client``, by client id.

    Raises ``ValueError`` for a folder without a run, and for a run whose algorithm has no
    personalized models or that kept no states, and ``StateError`` as
    :func:`clients.personalized_model`.
    """
    results = Path(results)
    settings = results / "config.json"
    if not settings.is_file():
        raise ValueError(f"{results} is no results folder of a run: it has no config.json")
    config = RunConfig(**json.loads(settings.read_text()))
    model = fresh_model(config)
    check_promises(config.algorithm, model)
    if (states := state_folder(config)) is None:
        raise ValueError(f"the run in {results} kept no states: {HOW_TO_KEEP}")
    if (shared := results / "model.safetensors").is_file():
        model.module.load_state_dict(load_file(shared))
    checkpoints = results / "checkpoints"
    last = checkpoints if checkpoints.is_dir() else None
    if client is None:
        return personalized_models(states, model, checkpoints=last)
    return {client: personalized_model(DirectoryStore(states, client), model, checkpoints=last)}


def write(model: PersonalizedModel, path: Path) -> None:
    """Write a personalized model, with its client and round, as a safetensors file."""
    about = {"client": str(model.client), "round": str(model.round)}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(model), path, metadata=about)
    how = "which the server used" if model.acknowledged else "its newest"
    print(f"client {model.client}: round {model.round}, {how}: {path.absolute()}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Command("personalized", __doc__)
    parser.add_argument("results", type=Path, help="results folder of the run")
    parser.add_argument("--client", type=int, help="client id; by default all clients")
    parser.add_argument(
        "--output", required=True, type=Path, help="file for the client's model, folder for all"
    )
    args = parser.read(arguments)
    with parser.explained():
        for client, model in of_run(args.results, args.client).items():
            path = args.output / f"client-{client}.safetensors"
            write(model, path if args.client is None else args.output)


if __name__ == "__main__":
    main()
