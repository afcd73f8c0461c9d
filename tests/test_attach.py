"""An app with its user's ``@app.train``, for any algorithm: ``clients.ClientApp``, ``attach``.

Mistakes these laws are written against: a model that the algorithm does not start from, arrays that
a strict ``load_state_dict`` refuses, a reply without its user's metrics, other messages that do not
arrive as they were, mods on what they do not understand, FedAvg under another name.
"""

from __future__ import annotations

import difflib
import functools
import io
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from federations import drop
from flwr import clientapp
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from laws import START, TABLE, train
from limits import RATE
from own_loops import descend, own_app
from problems import NODES, Linear, Quadratic, half_mean_square, quadratics, to_record, to_vector
from test_apps import accuracy, run_in_one_process
from test_own_training import OTHERS
from torch import nn
from torch.optim import SGD

from clients import (
    Border,
    ClientApp,
    DirectoryStore,
    InProcessGrid,
    attach,
    client_id,
    personalized_model,
)
from fl_strategies import SCAFFOLD, Ditto, FedADMM, FedAvg, FedBC, FedProx, NothingUsable, apps
from fl_strategies.messages.description import DESCRIBE, QUERY, Description
from simulations.lab.deployment import Federation
from simulations.lab.superlink import flwr_run

ROW = {row.name: row for row in TABLE}


def with_functions(
    app: clientapp.ClientApp,
    problems: Sequence[Quadratic],
    *,
    attaches: bool = True,
    loop: Callable[..., Any] = descend,
    module: Callable[[], nn.Module] = Linear,
    inside: Any = None,
) -> Any:
    """Return ``app`` with functions such as a Flower user has."""

    @app.train(mods=inside)
    def fit(msg: Message, context: Context) -> Message:
        q = problems[client_id(context)]
        model = module()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        if attaches:
            attach(model)
        loop(model, msg.content.config_records.get("config", {}), q)
        metrics = MetricRecord({"train_loss": 0.5, "num-examples": q.n})
        arrays = ArrayRecord(model.state_dict())
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        q = problems[client_id(context)]
        model = module()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        attach(model)
        with torch.no_grad():
            loss = float(half_mean_square(model(torch.tensor(q.X)), torch.tensor(q.y)))
        metrics = MetricRecord({"eval_loss": loss, "num-examples": q.n})
        return Message(RecordDict({"metrics": metrics}), reply_to=msg)

    return app


def ask(app: Any, content: RecordDict, kind: str = "train", client: int = 0) -> Message:
    message = Message(content, dst_node_id=NODES[client], message_type=kind)
    (reply,) = InProcessGrid(app, 3).send_and_receive([message])
    return reply


def request(**config: Any) -> RecordDict:
    config = {name.replace("_", "-"): value for name, value in config.items()}
    return RecordDict({"arrays": to_record(START), "config": ConfigRecord(config)})


@pytest.mark.parametrize(
    "name",
    [
        "fedavg",
        "fednova",
        "scaffold",
        "fedadmm",
        "fedpd",
        "fedbc",
        "fedbcd-i-async",
        "ditto",
        "fedrep",
    ],
)
def test_a_loop_is_the_same_to_the_bit_through_messages(name: str) -> None:
    """For what rules ask of it: steps alone, what they add up to, steps aside or ahead, a part."""
    row, problems, ends = ROW[name], quadratics(4), []
    loop = functools.partial(descend, momentum=0.9 if name in ("scaffold", "fednova") else 0.0)
    for app in (own_app(problems, loop), with_functions(ClientApp(), problems, loop=loop)):
        options = OTHERS.get(name, {}) | ({"fraction_train": 0.75} if row.partial else {})
        strategy = row.strategy(local={}, node_wait=0.01, **options)
        on = InProcessGrid(app, 4, fault=drop(0.3) if row.partial else None)
        ends.append(train(strategy, on, 4))
    np.testing.assert_array_equal(*ends)
    assert np.abs(ends[0] - START).max() > 0.1


@pytest.mark.parametrize("strategy", [FedAvg, FlowerFedAvg])
def test_under_fedavg_it_is_the_app_of_flower_to_the_bit(strategy: Any) -> None:
    problems, ends, replies = quadratics(3), [], []
    for app in (clientapp.ClientApp(), ClientApp()):
        heard: list[Message] = []
        with_functions(app, problems, attaches=False)
        on = InProcessGrid(app, 3, fault=lambda _, reply, heard=heard: heard.append(reply) or reply)
        random.seed(0)  # which Flower's strategy samples by
        result = strategy(fraction_evaluate=0.0).start(on, to_record(START), 3)
        ends.append(to_vector(result.arrays))
        heard = [reply for reply in heard if reply.metadata.message_type == "train"]
        replies.append([reply.content for reply in heard])
    np.testing.assert_array_equal(*ends)
    for theirs, ours in zip(*replies, strict=True):
        assert theirs["arrays"] == ours["arrays"]
        assert dict(theirs["metrics"]).items() <= dict(ours["metrics"]).items()
        if strategy is FlowerFedAvg:
            assert theirs == ours


def test_our_fedavg_and_flowers_give_one_model_around_the_same_app() -> None:
    problems, ends = quadratics(3), []
    for strategy in (FedAvg, FlowerFedAvg):
        app = with_functions(ClientApp(), problems)
        one = strategy(fraction_evaluate=0.0)
        ends.append(to_vector(one.start(InProcessGrid(app, 3), to_record(START), 3).arrays))
    np.testing.assert_allclose(*ends, rtol=1e-14)


# ---- messages -----------------------------------------------------------------------------------


def test_the_reply_has_its_users_metrics_and_those_of_the_algorithm() -> None:
    app = with_functions(ClientApp(), quadratics(3))
    asked = request(algorithm="fedprox", proximal_mu=0.5, server_round=1, run_id="1")
    reply = ask(app, asked).content
    metrics = reply.metric_records["metrics"]
    assert (metrics["train_loss"], metrics["num-examples"], metrics["steps"]) == (0.5, 7, 4)
    assert reply.config_records["config"]["algorithm"] == "fedprox"
    assert list(reply.array_records) == ["arrays"]


def test_functions_get_a_fresh_model_without_control_and_a_config_with_a_seed() -> None:
    """What they write into it stays with them; SCAFFOLD's control variates do not reach them."""
    seen: list[Any] = []

    def loop(model: nn.Module, config: Any, q: Quadratic) -> None:
        seen.append((config["seed"], config["server-round"]))
        config["server-round"] = 99
        descend(model, config, q)

    app = with_functions(ClientApp(), quadratics(3), loop=loop)
    content = request(algorithm="scaffold", option="II", server_round=4, seed=3, run_id="1")
    for name, array in dict(content["arrays"]).items():
        content["arrays"][f"control/{name}"] = array
    reply = ask(app, content)
    assert not reply.has_error(), reply.error
    assert [number for _, number in seen] == [4]
    assert 0 <= seen[0][0] < 2**32
    assert seen[0][0] != 3
    assert content["config"]["server-round"] == 4
    assert list(reply.content["arrays"]) == [*content["arrays"]]


def test_other_actions_and_requests_that_name_no_algorithm_reach_the_functions_untouched() -> None:
    app, seen = ClientApp(), []

    def echo(msg: Message, context: Context) -> Message:
        attach(nn.Linear(1, 1))  # which does nothing here
        seen.append(msg.content)
        return Message(msg.content, reply_to=msg)

    app.train()(echo)
    app.train("further")(echo)
    app.evaluate()(echo)
    app.query("own")(echo)
    for kind, content in (
        ("train", request(lr=0.1)),
        ("train.further", request(algorithm="fedadmm")),
        ("evaluate", RecordDict()),
        ("query.own", RecordDict()),
    ):
        assert ask(app, content, kind).content == content
        assert seen.pop() == content


def test_it_answers_the_servers_queries_unless_a_function_of_the_users_does() -> None:
    app = with_functions(ClientApp(), quadratics(3))
    about = ask(app, RecordDict(), "query", 2).content["client"]
    assert dict(about) == {"client-id": 2, "num-partitions": 3}
    describe = RecordDict({DESCRIBE: ConfigRecord({DESCRIBE: True})})
    assert dict(ask(app, describe, QUERY).content["client"]) == {}
    known = ask(ClientApp(model=Linear), describe, QUERY).content["client"]["description"]
    assert Description.of(known).arrays == ("head", "tail")

    @app.query()
    def query(msg: Message, context: Context) -> Message:
        return Message(RecordDict({"mine": ConfigRecord({"client-id": 7})}), reply_to=msg)

    assert list(ask(app, RecordDict(), "query").content) == ["mine"]


def test_one_client_a_node_and_no_legacy_client_fn() -> None:
    with pytest.raises(ValueError, match="model must be a function that returns it, got"):
        ClientApp(model=Linear())
    with pytest.raises(ValueError, match="client_fn is Flower's legacy form"):
        ClientApp(lambda context: None)  # type: ignore[arg-type]
    from clients import AnyAlgorithmClient, client_app

    def client_fn(context: Context) -> AnyAlgorithmClient:
        raise AssertionError

    sent: list[Message] = []
    hosting = InProcessGrid(
        client_app(client_fn, hosts=[0, 1]), 2, hosts=1, fault=lambda m, r: sent.append(m) or r
    )
    train(FedAvg(fraction_evaluate=0.0), hosting, 1)
    about_several = next(m for m in sent if m.metadata.message_type == "train")
    app = with_functions(ClientApp(), quadratics(3))
    reply = ask(app, about_several.content)
    assert "about several clients, and this node is one" in reply.error.reason


# ---- mods ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["outside", "inside"])
def test_a_mod_stands_where_flowers_order_says(place: str) -> None:
    """Outside it sees what the server sent and what the algorithm uploads, else each training."""
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def mod(msg: Message, context: Context, call_next: Any) -> Message:
        before = to_vector(msg.content["arrays"])
        reply = call_next(msg, context)
        if msg.metadata.message_type == "train":
            seen.append((before, to_vector(reply.content["arrays"])))
        return reply

    mods = {"mods": [mod]} if place == "outside" else {}
    app = ClientApp(**mods)
    with_functions(app, quadratics(1), inside=[mod] if place == "inside" else None)
    train(FedADMM(fraction_evaluate=0.0), InProcessGrid(app, 1), 1)
    ((before, after),) = seen
    np.testing.assert_array_equal(before, START)
    changed = np.abs(after).max() if place == "outside" else np.abs(after - START).max()
    assert changed > 0.1


def secagg_mod(msg: Message, context: Context, call_next: Any) -> Message:
    """Is recognised by its name."""
    return call_next(msg, context)  # type: ignore[no-any-return]


@pytest.mark.parametrize("place", ["outside", "inside"])
@pytest.mark.parametrize("mod", [fixedclipping_mod, LocalDpMod(1.0, 1.0, 1.0, 0.1), secagg_mod])
def test_mods_that_clip_add_noise_or_mask_are_refused_where_changes_are_uploaded(
    place: str, mod: Any, caplog: pytest.LogCaptureFixture
) -> None:
    app = ClientApp(mods=[mod] if place == "outside" else None)
    with_functions(app, quadratics(3), inside=[mod] if place == "inside" else None)
    asked = request(algorithm="fedadmm", rho=0.5)
    asked["config"]["clipping_norm"] = 1.0
    reply = ask(app, asked)
    assert "would change what fedadmm" in reply.error.reason


def test_a_clipping_mod_acts_on_a_model_that_is_uploaded() -> None:
    app = with_functions(ClientApp(mods=[fixedclipping_mod]), quadratics(3))
    asked = request(algorithm="fedprox", proximal_mu=0.5)
    asked["config"]["clipping_norm"] = 0.01
    reply = ask(app, asked)
    assert not reply.has_error(), reply.error
    moved = to_vector(reply.content["arrays"]) - START
    assert np.linalg.norm(moved) == pytest.approx(0.01, rel=1e-6)


def averaged(msg: Message, context: Context, call_next: Any) -> Message:
    """Reply with other weights than the steps came to, as an average of all steps is."""
    reply: Message = call_next(msg, context)
    arrays = to_vector(reply.content["arrays"])
    reply.content["arrays"] = to_record(0.9 * arrays)
    return reply


@pytest.mark.parametrize("algorithm", ["scaffold", "fednova", "fedbcd"])
def test_where_a_rule_counts_on_the_steps_other_weights_in_the_reply_are_an_error(
    algorithm: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = with_functions(ClientApp(), quadratics(2), inside=[averaged])
    strategy = ROW[algorithm].strategy(local={}, node_wait=0.01, max_unusable_rounds=1)
    with pytest.raises(NothingUsable, match="changed the model in its reply"):
        train(strategy, InProcessGrid(app, 2), 1)


# ---- attach -------------------------------------------------------------------------------------


def test_without_attach_an_algorithm_with_terms_is_an_error_that_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = with_functions(ClientApp(), quadratics(1), attaches=False)
    train(FedProx(fraction_evaluate=0.0), InProcessGrid(app, 1), 1)
    assert "nothing was attached: call attach(model) after load_state_dict" in caplog.text
    assert "4 steps were of other parameters" in caplog.text


def dressed(wrap: Callable[[nn.Module], nn.Module], names: Any = None) -> Any:
    """Return functions whose model is wrapped before it is attached."""

    def loop(model: nn.Module, config: Any, q: Quadratic) -> None:
        wrapped = wrap(model)
        attach(wrapped, names)
        x, y = torch.tensor(q.X), torch.tensor(q.y)
        optimizer = SGD(wrapped.parameters(), RATE)
        for _ in range(4):
            optimizer.zero_grad()
            half_mean_square(model(x), y).backward()
            optimizer.step()

    return loop


class Inner(nn.Module):
    """Has its module under another name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.adapted = model


@pytest.mark.parametrize(
    ("wrap", "names"),
    [
        (nn.DataParallel, None),
        (lambda model: torch.compile(model, backend="eager"), None),
        (Inner, {"adapted.head": "head", "adapted.tail": "tail"}),
    ],
    ids=["DataParallel", "compiled", "names"],
)
def test_a_wrapper_of_the_module_can_be_attached(wrap: Any, names: Any) -> None:
    problems, ends = quadratics(2), []
    for loop, attaches in ((descend, True), (dressed(wrap, names), False)):
        app = with_functions(ClientApp(), problems, loop=loop, attaches=attaches)
        one = FedADMM(fraction_evaluate=0.0)
        ends.append(train(one, InProcessGrid(app, 2), 2))
    np.testing.assert_array_equal(*ends)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (Inner, "the attached module has no parameters .*'head', 'tail'.*attach.model, names="),
        (lambda model: nn.ParameterDict({"head": nn.Parameter(torch.zeros(3)),
         "tail": nn.Parameter(torch.zeros(1))}), "'head' of the attached module has shape"),
    ],
)  # fmt: skip
def test_another_module_is_refused(
    wrap: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = with_functions(ClientApp(), quadratics(1), loop=dressed(wrap), attaches=False)
    reply = ask(app, request(algorithm="fedprox", proximal_mu=0.5))
    assert re.search(message, reply.error.reason), reply.error.reason


def replaced(model: nn.Module, config: Any, q: Quadratic) -> None:
    """Attach a model, and replace a parameter of it afterwards."""
    attach(model)
    model.tail = nn.Parameter(model.tail.detach().clone())  # type: ignore[assignment]
    descend(model, config, q)


def test_a_parameter_replaced_after_attach_is_an_error_where_the_algorithm_has_terms() -> None:
    app = with_functions(ClientApp(), quadratics(1), loop=replaced, attaches=False)
    assert not ask(app, request(algorithm="fedavg")).has_error()
    reply = ask(app, request(algorithm="fedprox", proximal_mu=0.5))
    assert "the reply's arrays ['tail'] changed, and no optimizer stepped" in reply.error.reason


def renamed(message: Message, context: Context, call_next: Any) -> Message:
    """A mod that reports a number by a name of FedBC's."""
    reply: Message = call_next(message, context)
    reply.content["metrics"]["lambda"] = 1.0  # type: ignore[index]
    return reply


@pytest.mark.parametrize(
    ("mod", "said"),
    [
        (renamed, "the app's function must not report ['lambda'], which the client of fedbc"),
        (lambda *_: None, "what the app's function returns must be a Message, got None"),
    ],
    ids=["name", "None"],
)
def test_a_reply_that_would_be_misread_is_an_error(
    mod: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = with_functions(ClientApp(), quadratics(1), inside=[mod])
    train(FedBC(fraction_evaluate=0.0), InProcessGrid(app, 1), 1)
    assert said in caplog.text


class Tied(nn.Module):
    """A frozen layer, and one of two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base, self.one, self.two = (nn.Linear(5, 5).double() for _ in range(3))
        self.two.weight = self.one.weight
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(self.base(x))).sum(1)


@pytest.mark.parametrize("known", [False, True])
def test_conventions_are_said_where_they_are_wrong_and_a_model_puts_them_right(
    known: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The functions get all arrays in either way; frozen ones travel, tied ones count twice."""
    sent: list[Message] = []
    app = ClientApp(model=Tied) if known else ClientApp()
    with_functions(app, quadratics(2), module=Tied)
    on = InProcessGrid(app, 2, fault=lambda m, r: sent.append(m) or r)
    strategy = FedADMM(fraction_evaluate=0.0)
    initial = ArrayRecord(Tied().state_dict())
    end = strategy.start(on, initial, 2).arrays
    arrays = next(m for m in sent if m.metadata.message_type == "train").content["arrays"]
    assert any(name.startswith("base") for name in arrays) != known
    warned = "['two.weight'] counts twice; ['base.weight', 'base.bias'] is frozen and travels"
    assert (warned in caplog.text) != known
    assert len(end) == len(initial)
    np.testing.assert_array_equal(end["one.weight"].numpy(), end["two.weight"].numpy())
    np.testing.assert_array_equal(end["base.weight"].numpy(), initial["base.weight"].numpy())
    assert not np.array_equal(end["one.weight"].numpy(), initial["one.weight"].numpy())


# ---- state, evaluation, engines -----------------------------------------------------------------


@pytest.mark.parametrize("own", [True, False])
def test_evaluation_has_the_users_metrics_and_own_ones_of_the_personalized_model(own: bool) -> None:
    app = with_functions(ClientApp(evaluate_own=own), quadratics(3))
    strategy = Ditto(lam=0.1)
    result = strategy.start(InProcessGrid(app, 3), to_record(START), 2)
    metrics = result.evaluate_metrics_clientapp[2]
    assert ("own-eval_loss" in metrics) == own
    if own:
        assert metrics["own-eval_loss"] < metrics["eval_loss"]


def test_the_store_is_a_function_of_the_context(tmp_path: Path) -> None:
    def store(context: Context) -> DirectoryStore:
        return DirectoryStore(tmp_path, client_id(context))

    app = with_functions(ClientApp(store=store), quadratics(2))
    on = InProcessGrid(app, 2)
    train(Ditto(fraction_evaluate=0.0), on, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "owner.json"}
    assert not any(context.state for context in on.client_contexts())
    model = personalized_model(store(next(on.client_contexts())), Linear())
    assert [*model] == ["head", "tail"]


def test_max_steps_bounds_a_request() -> None:
    app = with_functions(ClientApp(max_steps=3), quadratics(3))
    reply = ask(app, request(algorithm="fedavg"))
    assert "takes more than 3 optimizer steps" in reply.error.reason


def test_a_border_says_what_stays_at_home() -> None:
    """FedPer's head is each client's own, and the functions get it."""
    app = ClientApp(model=lambda: Border(Linear(), share="!tail"))
    with_functions(app, quadratics(2))
    on = InProcessGrid(app, 2)
    end = FedADMM(fraction_evaluate=0.0).start(on, to_record(START), 3).arrays
    np.testing.assert_array_equal(end["tail"].numpy(), START[4:])
    kept = [
        record["unshared/tail"].numpy()
        for context in on.client_contexts()
        for record in context.state.array_records.values()
    ]
    assert len({float(tail[0]) for tail in kept}) > 1


@pytest.mark.slow
def test_workers_train_the_app_to_the_bit() -> None:
    ends = [
        train(
            SCAFFOLD(fraction_evaluate=0.0),
            InProcessGrid(with_functions(ClientApp(), quadratics(3)), 3, workers=workers),
            2,
        )
        for workers in (1, 2)
    ]
    np.testing.assert_array_equal(*ends)


def test_an_app_can_be_sent_to_another_process() -> None:
    app = with_functions(ClientApp(), quadratics(1))
    file = io.BytesIO(cloudpickle.dumps(app))
    copy = cloudpickle.load(file)
    asked = request(algorithm="fedprox", proximal_mu=0.5, server_round=1)
    assert ask(copy, asked).content == ask(app, asked).content


# ---- Flower's own quickstart --------------------------------------------------------------------


def changed_lines(folder: Path, name: str) -> int:
    """Return how many lines with something in them the app adds to Flower's quickstart or drops."""
    before, after = (
        (folder / one / f"my_app/{name}.py").read_text().splitlines()
        for one in ("flower", "attach")
    )
    lines = difflib.ndiff(before, after)
    return sum(line[0] in "+-" and bool(line[2:].strip()) for line in lines)


def test_flowers_quickstart_changes_by_a_few_lines(tmp_path: Path) -> None:
    for kind in ("flower", "attach"):
        apps.write(kind, tmp_path / kind)
    assert changed_lines(tmp_path, "client_app") == 3 <= 6
    assert changed_lines(tmp_path, "server_app") == 4


OPTIONS = {"FedADMM": "", "FedAvg": "", "FedProx": "", "SCAFFOLD": "", "FedDyn": "alpha=0.1, ",
           "FedBC": "", "Ditto": ""}  # fmt: skip
"""Strategies with which the app runs as it stands, its SGD with momentum 0.9."""


def quickstart(folder: Path, name: str) -> Path:
    """Write the app with a strategy; return its file of the server."""
    apps.write("attach", folder / "app")
    path = folder / "app/my_app/server_app.py"
    text = path.read_text().replace("FedADMM", name)
    path.write_text(text.replace(f"{name}(", f"{name}({OPTIONS[name]}"))
    return path


def seeded(path: Path) -> None:
    """Have the server's app begin with the same model in each run."""
    begin = "    global_model = Net()\n"
    path.write_text(path.read_text().replace(begin, f"    torch.manual_seed(0)\n{begin}"))


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Two models are the same to the bit."""
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "FedADMM"])
def test_flowers_quickstart_trains_by_each_algorithm_as_it_stands(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quickstart(tmp_path, name)
    task = run_in_one_process(tmp_path, monkeypatch)
    assert "left out" not in caplog.text
    assert accuracy(task, torch.load("final_model.pt")) > 0.3


@pytest.mark.release
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("name", OPTIONS)
def test_flowers_quickstart_trains_on_ray_what_it_trains_in_one_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seeded(quickstart(tmp_path, name))
    log: list[str] = []
    rounds = {"num-server-rounds": 3}
    flwr_run(rounds, num_supernodes=4, on_line=log.append, app=tmp_path / "app")
    assert "left out" not in "\n".join(log)
    on_ray = torch.load("final_model.pt")
    task = run_in_one_process(tmp_path, monkeypatch, 4, rounds)
    assert accuracy(task, on_ray) > 0.3, "\n".join(log)
    assert_equal(torch.load("final_model.pt"), on_ray)


@pytest.mark.release
@pytest.mark.xdist_group("deployment")
@pytest.mark.parametrize("name", ["FedADMM", "SCAFFOLD"])
def test_flowers_quickstart_trains_on_supernodes_what_it_trains_in_one_process(
    name: str, federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = quickstart(tmp_path, name)
    seeded(path)
    text = path.read_text()
    path.write_text(text.replace('"final_model.pt"', repr(str(tmp_path / "final_model.pt"))))
    for i, node in enumerate(("node-0", "node-1")):
        federation.register(node)
        federation.supernode(node, i, 2)
    settings = {"num-server-rounds": 2, "local-epochs": 1}
    federation.run(tmp_path / "app", settings)
    deployed = torch.load(tmp_path / "final_model.pt")
    run_in_one_process(tmp_path, monkeypatch, 2, settings)
    assert_equal(torch.load(tmp_path / "final_model.pt"), deployed)


@pytest.mark.release
@pytest.mark.xdist_group("deployment")
@pytest.mark.parametrize("name", ["FedADMM", "FedAvg"])
def test_on_supernodes_of_which_one_is_killed_and_comes_back_the_quickstart_ends(
    name: str, federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The killed one's state was in its context: it begins anew, and the log says so. FedAvg's
    clients keep none."""
    monkeypatch.chdir(tmp_path)
    path = quickstart(tmp_path, name)
    options = "fraction_evaluate=0.0, node_wait=900.0"
    text = path.read_text().replace("fraction_evaluate=fraction_evaluate", options)
    path.write_text(text.replace('"final_model.pt"', repr(str(tmp_path / "final_model.pt"))))
    names = ("node-0", "node-1")
    for node in names:
        federation.register(node)
    nodes = [federation.supernode(node, i, 2) for i, node in enumerate(names)]
    log: list[str] = []

    def on_line(line: str) -> None:
        log.append(line)
        if "round 1/5:" in line:
            nodes[1].kill()
        if "round 2/5:" in line:
            federation.supernode("node-1", 1, 2)

    federation.run(tmp_path / "app", {"num-server-rounds": 5, "local-epochs": 1}, on_line=on_line)
    said = "\n".join(log)
    lost = "client 1 lost its state and is treated as new" in said
    assert lost == (name == "FedADMM"), said
    assert re.search(r"round 5/5: .*2 of 2 clients", said), said
