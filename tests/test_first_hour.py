"""The first hour of someone new: what they do, in this order, and what they read.

Each step is small; other files test its subject in detail.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from idioms import IDIOMS
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from clients import (
    AnyAlgorithmClient,
    Border,
    ContextStore,
    DirectoryStore,
    InProcessGrid,
    Problem,
    client_app,
    client_id,
    personalized_model,
)
from fl_strategies import (
    STRATEGIES,
    BestModel,
    Checkpoints,
    EarlyStop,
    FedADMM,
    FedAvg,
    FedBC,
    FedPDVR,
    History,
    NothingUsable,
)

ROOT = Path(__file__).parents[1]
CLIENTS = 3
LOCAL = {"lr": 0.05, "batch-size": 4}
Data = Callable[[int], tuple[Any, ...]]


def tensors(client: int, idiom: str = "batch-norm") -> tuple[Any, ...]:
    """Return a client's samples, of float32 as images are."""
    x, y = IDIOMS[idiom].samples(6 + client, client)
    return x.float(), y


def dataset(client: int) -> tuple[Any, ...]:
    """Return a Hugging Face Dataset, whose batches are dictionaries."""
    x, y = tensors(client)
    datasets = pytest.importorskip("datasets")
    return (datasets.Dataset.from_dict({"img": x.numpy(), "label": y.tolist()}),)


def loader(client: int) -> tuple[Any, ...]:
    return (DataLoader(TensorDataset(*tensors(client)), batch_size=4, shuffle=True),)


def net(idiom: str = "batch-norm") -> nn.Module:
    torch.manual_seed(1)
    return IDIOMS[idiom].make()


def initial(idiom: str = "batch-norm") -> ArrayRecord:
    return ArrayRecord(net(idiom).state_dict())


def grid(
    idiom: str = "batch-norm",
    data: Data | None = None,
    states: Path | None = None,
    **options: Any,
) -> InProcessGrid:
    """Return a user's clients, which keep their states in ``states`` or in their contexts."""

    def client_fn(context: Context) -> AnyAlgorithmClient:
        me = client_id(context)
        samples = data(me) if data else tensors(me, idiom)
        problem = Problem(Border(net(idiom)), cross_entropy, *samples)
        store = DirectoryStore(states, me) if states else ContextStore(context)
        return AnyAlgorithmClient(problem, client_id=me, test=problem, store=store)

    return InProcessGrid(client_app(client_fn), CLIENTS, **options)


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Test as Flower's quickstart does, under its names; the accuracy falls after round 2."""
    return MetricRecord({"accuracy": 0.5 - abs(server_round - 2) / 10, "loss": 1.0})


def all_trained(result: Any, rounds: int) -> None:
    assert result.skipped == []
    used = {n: m["clients-used"] for n, m in result.train_metrics_clientapp.items()}
    assert used == dict.fromkeys(range(1, rounds + 1), CLIENTS)


def shown(caplog: pytest.LogCaptureFixture, level: int = INFO) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


# ---- it runs -------------------------------------------------------------------------------------


def test_1_the_import_is_silent_and_tells_the_version(tmp_path: Path) -> None:
    program = "import fl_strategies; print(fl_strategies.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", done.stdout)
    assert done.stderr == ""


def test_2_the_readmes_program_prints_the_number_beside_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(compile(program, "README.md", "exec"), {})
    (number,) = re.findall(r"  # ([\d.]+)$", program, re.MULTILINE)
    assert capsys.readouterr().out == f"{number}\n"


@pytest.mark.parametrize("idiom", ["quickstart", "batch-norm"])
@pytest.mark.parametrize("algorithm", ["fedavg", "fedadmm", "scaffold"])
def test_3_flowers_quickstart_and_batch_norm_train_with_nothing_declared(
    algorithm: str, idiom: str
) -> None:
    strategy = STRATEGIES[algorithm](fraction_evaluate=0.0, local=LOCAL)
    all_trained(strategy.start(grid(idiom), initial(idiom), num_rounds=1), 1)


@pytest.mark.parametrize("data", [dataset, loader], ids=lambda data: data.__name__)
def test_4_data_train_as_people_have_them(data: Data) -> None:
    all_trained(FedAvg(local=LOCAL).start(grid(data=data), initial(), num_rounds=1), 1)


@pytest.mark.parametrize("size", [0, 3])
def test_4_other_mini_batches_than_a_dataloaders_are_refused(size: int) -> None:
    strategy = FedAvg(local=LOCAL | {"batch-size": size})
    asked = "local asks for 3" if size else "local asks for the full batch"
    with pytest.raises(NothingUsable, match=f"here of batch_size = 4, and {asked}"):
        strategy.start(grid(data=loader), initial(), num_rounds=3)


def test_5_flowers_usual_evaluation_serves_callbacks(tmp_path: Path) -> None:
    best = BestModel(tmp_path / "best.safetensors", "accuracy")
    strategy = FedADMM(
        local=LOCAL,
        callbacks=[EarlyStop("accuracy", patience=2), best, History(tmp_path / "history")],
    )
    result = strategy.start(grid(), initial(), num_rounds=9, evaluate_fn=evaluate)
    all_trained(result, 4)
    assert best.best_round == 2
    assert not net().load_state_dict(load_file(best.path)).missing_keys


# ---- mistakes ------------------------------------------------------------------------------------


def typo(name: str) -> str:
    """Return the name without a letter in its middle, or with a second one if it is short."""
    middle = len(name) // 2
    return name[:middle] + name[middle + 1 :] if len(name) > 3 else name + name[-1]


def one_line(call: Callable[[], Any], hint: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(hint)) as error:
        call()
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_6_a_typo_in_any_argument_or_setting_is_answered_with_its_name() -> None:
    for make in (FedAvg, FedADMM, FedBC):
        for name in make.declarations:
            if len(name) > 1 and typo(name) not in make.declarations:
                one_line(lambda name=name, make=make: make(**{typo(name): 1}), f"mean {name!r}?")
    for name in ("lr", "epochs", "batch_size", "momentum", "weight_decay"):
        one_line(lambda name=name: FedAvg(**{name: 1}), f"local={{...}} takes ['{name}']")
        none = f"no argument {name!r}; its own"  # its hyperparameters set its steps
        one_line(lambda name=name: FedPDVR(**{name: 1}), none)
    one_line(lambda: FedAvg(local={"epoch": 1}), "mean 'epochs'?")


# ---- what is printed -----------------------------------------------------------------------------


def test_9_a_round_is_one_short_line(caplog: pytest.LogCaptureFixture) -> None:
    config = ConfigRecord({"epoch": 1})
    FedADMM(local=LOCAL).start(grid(), initial(), num_rounds=2, train_config=config)
    rounds = [line for line in shown(caplog) if line.startswith("round ")]
    assert len(rounds) == 2
    for line in rounds:
        assert re.fullmatch(
            r"round \d/2: eval-loss [\d.]+, eval-accuracy [\d.]+, 3 of 3 clients, [\d.]+ s", line
        )
        assert len(line) <= 160
    assert shown(caplog, WARNING) == ["train_config has 'epoch' (did you mean 'epochs'?)"]
    caplog.clear()
    FedADMM(local=LOCAL, quiet=True).start(grid(), initial(), num_rounds=1)
    assert not shown(caplog)


def test_10_a_clients_error_is_told_once_with_the_users_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(client: int) -> tuple[Any, ...]:
        raise FileNotFoundError(f"no samples of client {client}") if client else OSError("no disk")

    result = FedAvg(local=LOCAL, quiet=True).start(grid(data=broken), initial(), num_rounds=2)
    told = [line for line in shown(caplog, WARNING) if "disk" in line]
    assert len(told) == 1
    place = broken.__code__.co_firstlineno + 1
    assert f"OSError: no disk (test_first_hour.py:{place} in broken)" in told[0]
    assert result.skipped == [1, 2]


def test_11_a_run_in_which_nobody_could_answer_says_so_in_its_result() -> None:
    def lost(request: Message, reply: Message) -> Message | None:
        return None if request.metadata.message_type == "train" else reply

    result = FedADMM(local=LOCAL).start(grid(fault=lost), initial(), num_rounds=2)
    assert result.skipped == [1, 2]
    assert all((result.arrays[n].numpy() == a.numpy()).all() for n, a in initial().items())


# ---- what comes of it ----------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["files", "contexts"])
def test_12_a_personalized_model_is_loaded_into_the_plain_module(kept: str, tmp_path: Path) -> None:
    states = tmp_path if kept == "files" else None
    on = grid(states=states)
    FedBC(local=LOCAL).start(on, initial(), num_rounds=2)
    context = list(on.contexts.values())[1]
    store = DirectoryStore(tmp_path, 1) if states else ContextStore(context)
    module = net()
    before = module(tensors(1)[0])
    module.load_state_dict(personalized_model(store, module))
    assert not torch.equal(module(tensors(1)[0]), before)


def test_13_a_run_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    def start(folder: str, rounds: int) -> Any:
        checkpoints = Checkpoints(tmp_path / folder / "checkpoints")
        strategy = FedADMM(local=LOCAL, checkpoints=checkpoints, fraction_train=0.7)
        on = grid(states=tmp_path / folder / "states")
        return strategy.start(on, initial(), rounds, resume=True).arrays

    start("parts", 1)
    parts, whole = start("parts", 3), start("whole", 3)
    assert all((parts[name].numpy() == array.numpy()).all() for name, array in whole.items())


def test_14_fedavg_averages_a_plain_flower_app() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        module = net()
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = tensors(int(context.node_config["partition-id"]))
        weights = list(module.parameters())
        gradients = torch.autograd.grad(cross_entropy(module(x), y), weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= message.content["config"]["lr"] * gradient
        metrics = MetricRecord({"num-examples": len(x), "train_loss": 1.0})
        model = ArrayRecord(module.state_dict())
        return Message(RecordDict({"arrays": model, "metrics": metrics}), reply_to=message)

    strategy = FedAvg(fraction_evaluate=0.0)
    config = ConfigRecord({"lr": 0.01})
    result = strategy.start(InProcessGrid(app, CLIENTS), initial(), 1, train_config=config)
    all_trained(result, 1)
