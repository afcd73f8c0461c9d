"""Our strategies on a legacy Flower server: ``ServerApp(server_fn=...)`` with :func:`as_legacy`.

    def server_fn(context):
        strategy = as_legacy(FedADMM(rho=0.1, min_available_nodes=10), initial_arrays)
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=20))

A legacy server calls a strategy step by step, with ``FitIns`` for requests and ``FitRes`` for
replies. The adapter turns these into the messages of Flower's Message API and back: the strategy
and the resulting model are the same. What clients send is decoded and checked as messages are: a
malformed result is left out, and a client whose properties cannot be read is known by its node's
id.

- Legacy nodes do not say how many there are: set ``min_available_nodes`` to their number.
- ``num_rounds`` of ``ServerConfig`` counts rounds of messages, FedPD's communication rounds.
- Flower's secure aggregation exists on legacy servers only. The server learns the weighted mean of
  the uploads and no upload, which is enough for strategies whose ``averages`` is not "".
- A callback that ends the run cannot end the server: the server then asks no client any more.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common import (
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetParametersIns,
    Parameters,
)
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.serverapp import Grid

from fl_strategies.compat.translation import (
    Network,
    answer_to,
    check_status,
    evaluated,
    initial_model,
    node_of,
    proxies_of,
    to_parameters,
    trained,
    undecoded,
)
from fl_strategies.core.layout import few
from fl_strategies.core.log import quiet_log
from fl_strategies.core.records import Round, Upload
from fl_strategies.core.schedules import check
from fl_strategies.messages.wire import decode
from fl_strategies.server.composition import Caller
from fl_strategies.server.replies import one_line
from fl_strategies.server.stages import mean_with_parts
from fl_strategies.server.strategy import EvaluateFn, FederatedStrategy

Failure: TypeAlias = tuple[ClientProxy, Any] | BaseException
A_DAY = 86400
"""Seconds that Flower's own server waits for its first client."""


def as_legacy(
    strategy: FederatedStrategy,
    initial_arrays: ArrayRecord | None = None,
    *,
    num_rounds: int = 0,
    evaluate_fn: EvaluateFn | None = None,
    secure: SecAggPlusWorkflow | None = None,
) -> Strategy:
    """Return ``strategy`` as a ``flwr.server.strategy.Strategy``.

    Parameters
    ----------
    strategy : FederatedStrategy
        Any strategy of this package except asynchronous FedBCD.
    initial_arrays : ArrayRecord, optional
        The initial model, as for ``strategy.start``. Without it clients are asked for their models
        (``get_parameters``), one after another, until the strategy can start from one; its arrays
        are then called "0", "1", ...
    num_rounds : int (default 0: not known)
        What callbacks find in ``RoundInfo.num_rounds``.
    evaluate_fn : callable, optional
        ``evaluate_fn(server_round, arrays)`` as for ``strategy.start``. The loss that the legacy
        history wants is its metric ``test-loss`` or ``loss``; NaN if it has neither.
    secure : SecAggPlusWorkflow, optional
        The workflow that runs the rounds; its clients have ``secaggplus_mod``. Clients refuse to
        send numbers that the workflow's ranges would cut off, and have equal weights if the rule
        has. A round with an unusable reply is skipped: the reply cannot be taken out of the sum.

    Raises
    ------
    ValueError
        For a strategy that does not wait for a round's replies, or that has checkpoints, a
        ``download`` or Poisson sampling; with ``secure`` for one whose rule needs more than a mean.
        In the first round, as ``start``; with ``secure`` for a model with buffers, or arrays that
        clients do not share.
    """
    if strategy.checkpoints is not None:
        raise ValueError(
            "checkpoints need Strategy.start: a legacy server counts its rounds itself, from 1"
        )
    own_rounds = type(strategy).train_round is not FederatedStrategy.train_round
    if own_rounds or not strategy.waits_for_all:
        raise ValueError(
            f"{strategy.described} has no legacy form: it does not wait for the replies of a"
            " round, and a legacy server does"
        )
    if strategy.download is not None:
        raise ValueError(
            f"download={strategy.download!r} needs Strategy.start: a legacy server sends arrays of"
            " the model's types"
        )
    if strategy.privacy is not None and strategy.privacy.sampling == "poisson":
        raise ValueError(
            f"privacy={strategy.privacy!r} needs Strategy.start: a legacy server leaves out a round"
            ' that asks nobody, and its noise; use sampling="fixed"'
        )
    if secure is not None:
        _check_secure(strategy, secure)
    return _LegacyStrategy(strategy, initial_arrays, num_rounds, evaluate_fn, secure)


def _check_secure(strategy: FederatedStrategy, secure: SecAggPlusWorkflow) -> None:
    check("max_weight", secure.max_weight, low=1.0)
    name = strategy.described
    if not mean_with_parts(strategy):
        raise ValueError(
            f"{name} does not work with secure aggregation: the server learns only the mean of all"
            " uploads, and the rule needs more; FedAvg, FedProx, SCAFFOLD, FedADMM, FedDyn and"
            " A-FedPD work with it"
        )


class _LegacyStrategy(Strategy):
    def __init__(
        self,
        strategy: FederatedStrategy,
        initial_arrays: ArrayRecord | None,
        num_rounds: int,
        evaluate_fn: EvaluateFn | None,
        secure: SecAggPlusWorkflow | None,
    ) -> None:
        self.strategy, self.num_rounds, self.evaluate_fn = strategy, num_rounds, evaluate_fn
        self.secure = secure
        strategy.caller = Caller(legacy=True, masked=secure is not None)
        self._arrays = ArrayRecord()
        self._requests: dict[int, Message] = {}
        self._stopped = False
        if initial_arrays is not None:
            self._open(initial_arrays)

    def _open(self, arrays: ArrayRecord) -> None:
        self.strategy.open(arrays, self.num_rounds)
        self._arrays = arrays

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters | None:
        self.strategy.run.waited_since = time.monotonic()
        if not self._arrays:
            self._open_with_a_clients(client_manager)
        elif self.strategy.run.round:  # a second fit of the server
            self._open(self._arrays)
        return to_parameters(self._arrays)

    def _open_with_a_clients(self, manager: ClientManager) -> None:
        """Begin with the model of the first client whose model can be used."""
        if not manager.num_available():  # Flower looks for clients now, else in 5 seconds
            manager.wait_for(1, A_DAY)
        reasons = []
        for cid, proxy in manager.all().items():
            try:
                reply = proxy.get_parameters(
                    GetParametersIns({}), self.strategy.nodes.patience, None
                )
                check_status(reply)
                arrays, theta = initial_model(reply.parameters)
                first = self.strategy.first_state(theta)
                self.strategy.begin(first, Round(number=0, theta=theta), self.num_rounds)
                self._open(arrays)
            except Exception as error:
                reasons.append(f"node {cid}: {one_line(str(error))}")
            else:
                return
        raise ValueError(f"no client gave an initial model: {'; '.join(reasons[:20])}")

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        if self._stopped:
            return []
        self._take(parameters)
        network = cast(Grid, Network(client_manager))
        messages = self.strategy.configure_train(
            server_round, self._arrays, self._secure_config(), network
        )
        instructions = self._instructions(messages, client_manager, FitIns)
        if self.secure is not None:
            most = self.secure.modulus_range // self.secure.quantization_range - 1
            if len(instructions) > most:
                raise ValueError(
                    f"secure aggregation can sum at most {most} uploads (modulus_range over"
                    f" quantization_range), got {len(instructions)} clients"
                )
        return instructions

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: Sequence[Failure],
    ) -> tuple[Parameters | None, dict[str, Any]]:
        if len(results) > 1:
            self._check_masks([result for _, result in results])
        read = functools.partial(trained, masked=self.strategy.caller.masked)
        arrays, metrics = self.strategy.aggregate_train(
            server_round, self._replies(results, failures, read)
        )
        if arrays is None:
            return None, dict(metrics or {})
        self._arrays = arrays
        return to_parameters(arrays), dict(metrics or {})

    def evaluate(
        self, server_round: int, parameters: Parameters
    ) -> tuple[float, dict[str, Any]] | None:
        self._take(parameters)
        if self.evaluate_fn is None or self._stopped:
            return None
        number = self.strategy.run.rounds_before + server_round
        metrics = self.evaluate_fn(number, self.strategy.evaluated_model(self._arrays))
        if metrics is None:
            return None
        self.strategy.result.evaluate_metrics_serverapp[number] = metrics
        loss = metrics.get("test-loss", metrics.get("loss", float("nan")))
        return cast(float, loss), dict(metrics)

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        if self._stopped:
            return []
        network = cast(Grid, Network(client_manager))
        messages = self.strategy.configure_evaluate(
            server_round, self._arrays, ConfigRecord(), network
        )
        instructions = self._instructions(messages, client_manager, EvaluateIns)
        if not instructions:  # then the server does not call aggregate_evaluate
            self._end()
        return instructions

    def aggregate_evaluate(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, EvaluateRes]],
        failures: Sequence[Failure],
    ) -> tuple[float | None, dict[str, Any]]:
        metrics = dict(
            self.strategy.aggregate_evaluate(
                server_round, self._replies(results, failures, evaluated)
            )
            or {}
        )
        self._end()
        return cast("float | None", metrics.get("eval-loss")), metrics

    def _end(self) -> None:
        with quiet_log(self.strategy.quiet):
            self._stopped = self.strategy.close_round(self._arrays)

    def _take(self, parameters: Parameters) -> None:
        """Continue with the server's model: a wrapper may have added noise to the strategy's.

        Raises ``ValueError`` if it did so to arrays that no client trains or shares.
        """
        tensors = zip(self._arrays, parameters.tensors, strict=True)
        arrays = ArrayRecord({n: Array(decode(undecoded(data))) for n, data in tensors})
        model, before = self.strategy.model, self._arrays
        stay = () if model is None else arrays.keys() - model.layout.shapes.keys()
        if changed := [
            n for n in stay if arrays[n].numpy().tobytes() != before[n].numpy().tobytes()
        ]:
            raise ValueError(
                f"arrays {few(sorted(changed))} are not shared by the clients, and a wrapper has"
                " changed them: use a model whose arrays are all trained and shared"
            )
        self._arrays = arrays

    # ---- secure aggregation -------------------------------------------------------------------

    def _secure_config(self) -> ConfigRecord:
        if self.secure is None:
            return ConfigRecord()
        weights = self.strategy.weights_of(Round(), [Upload(0, np.zeros(0), 2)])
        return ConfigRecord(
            {
                "secure-range": float(self.secure.clipping_range),
                "secure-max-weight": float(self.secure.max_weight),
                "secure-alike": weights == [1.0],
            }
        )

    def _check_masks(self, results: Sequence[FitRes]) -> None:
        """Raise ``ValueError`` if replies are masked and should not be, or the other way round.

        The workflow puts the mean, as one object, in the place of each masked reply's parameters.
        """
        masked = all(result.parameters is results[0].parameters for result in results)
        if masked and self.secure is None:
            raise ValueError(
                "the round ran under secure aggregation, which clients and strategy do not know:"
                " give as_legacy the workflow as `secure`"
            )
        if self.secure is not None and not masked:
            raise ValueError(
                "replies came without secure aggregation: run the rounds by"
                " DefaultWorkflow(fit_workflow=workflow) with the workflow that as_legacy got as"
                " `secure`, or give as_legacy none"
            )

    # ---- messages as instructions, results as replies -----------------------------------------

    def _instructions(
        self, messages: Iterable[Message], manager: ClientManager, kind: Callable[..., Any]
    ) -> list[tuple[ClientProxy, Any]]:
        """Return an instruction for each message whose client is still connected."""
        proxies = proxies_of(manager)
        self._requests = {m.metadata.dst_node_id: m for m in messages}
        return [
            (
                proxies[node],
                kind(
                    to_parameters(next(iter(message.content.array_records.values()))),
                    dict(next(iter(message.content.config_records.values()))),
                ),
            )
            for node, message in self._requests.items()
            if node in proxies
        ]

    def _replies(
        self,
        results: Iterable[tuple[ClientProxy, Any]],
        failures: Iterable[Failure],
        content: Callable[[Message, Any], RecordDict],
    ) -> list[Message]:
        """Return the replies; a failure that is an exception names no client, and is left out."""
        answers = [*results, *(f for f in failures if not isinstance(f, BaseException))]
        return [
            answer_to(request, result, content)
            for proxy, result in answers
            if (request := self._requests.get(node_of(proxy.cid))) is not None
        ]
