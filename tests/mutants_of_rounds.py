"""Mutants of what every round goes through: sums, files, replies, state. See mutants.py."""

from trials import of

A_FEDPD = "tests/test_a_fedpd.py tests/test_hosts.py -k 'a-fedpd or a_fedpd'"
"""Tests of what a request carries for one client alone."""

ROUNDS = [
    # ---- core: sums, layouts, schedules, streams, files ----------------------------------------
    *of(
        "fl_strategies/core/subproblem.py",
        "tests/test_solvers.py tests/test_fedadmm.py",
        {
            "g + self.slope +": "g - self.slope +",
            "(w - self.centre)": "(w + self.centre)",
        },
    ),
    *of(
        "fl_strategies/core/vectors.py",
        "tests/test_vectors.py tests/test_hyperparameters.py tests/test_strategy.py",
        {
            "return total / weights": "return total",
            "total = total + weight * vector": "total = total + vector",
        },
    ),
    *of(
        "fl_strategies/core/clipping.py",
        "tests/test_clipping.py",
        {
            "if norm(u) <= bound:": "if norm(u) >= bound:",
            "largest * float(np.linalg.norm(u / largest))": "float(np.linalg.norm(u))",
        },
    ),
    *of(
        "fl_strategies/core/layout.py",
        "tests/test_wire.py tests/test_layouts.py tests/test_strategy.py tests/test_fedadmm.py",
        {
            "self._examples += num_examples": "self._examples += 1",
            "np.maximum(old, new)": "np.minimum(old, new)",
            "n not in self.buffers and n not in self.copies": "n not in self.buffers",
            "np.concatenate([np.ravel(arrays[n]) for n in self.trainable], dtype=np.float64)": (
                "np.concatenate([np.ravel(arrays[n]) for n in self.trainable])"
            ),
        },
    ),
    *of(
        "fl_strategies/core/schedules.py",
        "tests/test_hyperparameters.py tests/test_laws.py",
        {
            "if first <= server_round": "if first < server_round",
            "low <= setting <= high": "low < setting <= high",
            "and not isinstance(setting, bool)": "",
        },
    ),
    *of(
        "fl_strategies/core/randomness.py",
        "tests/test_strategy.py tests/test_hyperparameters.py tests/test_laws.py",
        {
            "words = (seed, zlib.crc32(purpose.encode()), *indices)": "words = (seed, *indices)",
            "*indices)\n    if min": ")\n    if min",
        },
    ),
    *of(
        "fl_strategies/core/files.py",
        "tests/test_state.py tests/test_state_files.py tests/test_checkpoints.py"
        " tests/test_checkpoint_folders.py",
        {
            'if metadata["sha256"] != _digest(arrays):': "if not metadata:",
            "            os.replace(temporary, path)\n    finally": (
                "            path.write_bytes(content)\n    finally"
            ),
            "except Timeout:": "except ZeroDivisionError:",
        },
    ),
    *of(
        "fl_strategies/core/stacks.py",
        "tests/test_stacks.py tests/test_fedbc.py tests/test_fedpd.py tests/test_fedpd_rules.py",
        {
            "total[..., None] if total.ndim": "total if total.ndim",
            "number.clip(min=low).clip(max=high)": "number.clip(min=low)",
            "choose(times > number,": "choose(times >= number,",
        },
    ),
    # ---- acknowledgement, replies, bounds, checkpoints -----------------------------------------
    *of(
        "fl_strategies/core/ledger.py",
        "tests/test_fedadmm.py tests/test_failures.py",
        {
            "self.acked.get(client, -1)": "self.acked.get(client, 0)",
            "upload.client: upload.round for": "upload.client: 0 for",
            "self.nonces = self.nonces | {": "self.nonces = {",
            "newcomer=client not in self.acked": "newcomer=client in self.acked",
            'if self.lost_state == "refuse":': 'if self.lost_state == "reset":',
            "and nonce != recorded": "and nonce == recorded",
        },
    ),
    *of(
        "fl_strategies/messages/bounds.py",
        "tests/test_clipping.py",
        {
            "<= self.bound:\n                raise": "<= 10 * self.bound:\n                raise",
            "change = upload.vector - self.reference(upload)": "change = upload.vector",
            "vector=self.reference(upload) + clip": "vector=clip",
            "if self.accumulates_changes:\n": "if not self.accumulates_changes:\n",
        },
    ),
    *of(
        "fl_strategies/messages/identity.py",
        "tests/test_replies.py tests/test_layouts.py",
        {
            "elif ran != self.algorithm:": "elif False:",
            "if not self.trust:": "if self.trust:",
            "if roles and roles != self.layout.signature:": "if False:",
        },
    ),
    *of(
        "fl_strategies/server/replies.py",
        "tests/test_hostile_replies.py tests/test_odd_replies.py tests/test_replies.py"
        " tests/test_strategy.py",
        {
            "elif client in came:": "elif False:",
            "if node not in asked.by_node:": "if False:",
            "if is_reply_to(message, request.about)]": "]",
            "c if c.isprintable() else": "c if c else",
        },
    ),
    *of(
        "fl_strategies/server/patience.py",
        "tests/test_giving_up.py",
        {
            "if used or not unusable:": "if used:",
            "diverged=all(": "diverged=not all(",
        },
    ),
    *of(
        "fl_strategies/messages/folding.py",
        "tests/test_folding.py",
        {
            "self.weight(upload, **self.terms.hyperparameters)": "1.0",
            "np.concatenate(self._sums) / self._weight": "np.concatenate(self._sums)",
            "np.concatenate(self._plain) / self._count": "np.concatenate(self._plain)",
            "self._weight + weight, self._count + 1": "self._weight + 1.0, self._count + 1",
            "total += weight * vector": "total += vector",
            "[weight * vector for vector in vectors]": "[*vectors]",
            "if nonce and reply.words": "if not nonce and reply.words",
            "upload = self.bound.check(upload)": "self.bound.check(upload)",
            "moved = vectors[0] - self.theta": "moved = vectors[0]",
            "float(moved @ moved)": "float(moved @ moved) ** 0.5",
        },
    ),
    *of(
        "fl_strategies/server/reading.py",
        "tests/test_folding.py",
        {
            "bounds[DISTANCE] = 0.0, (most": "bounds[DISTANCE] = -math.inf, (most",
            "(most * (1.0 + ROUNDING)) ** 2": "math.inf",
            "self._bound(bound * (1.0 + ROUNDING), ": "self._bound(math.inf, ",
            "np.dot(weights, distances2)) / total": "np.dot(weights, distances2))",
            "most + rounding:": "math.inf:",
            "ROUNDING * most + 1e-12 * norm(mean)": "0.0",
        },
    ),
    *of(
        "fl_strategies/server/sending.py",
        "tests/test_hosts.py -k 'bounded or slow'",
        {"min(self.algorithm.clients_per_message, per_message(size))": "per_message(size)"},
    ),
    *of(
        "fl_strategies/messages/hosting.py",
        "tests/test_hosts.py tests/test_host_claims.py",
        {
            "MOST_BYTES // max(size, 1)": "MOST_CLIENTS",
            "type(v) is int and v >= 0": "type(v) is int",
            "len(stack) != len(clients)": "False",
            "twice = {*failures} & {*numbers, *words, *slices}": "twice = {*()}",
        },
    ),
    *of(
        "fl_strategies/server/sending.py",
        A_FEDPD,
        {
            "asked.round.acked.get(client, -1)": "asked.round.number",
            "sum(map(len, {*catch_ups}))": "sum(map(len, catch_ups))",
            "each * len(clients) + sum(map(len, catch_ups))": "each * len(clients)",
            "            self._add_catch_up(state, asked, configs)\n": "            pass\n",
        },
    ),
    *of(
        "fl_strategies/messages/hosting.py",
        A_FEDPD,
        {
            "row[CATCH_UP] = catch_ups[row[CATCH_UP]]": "row[CATCH_UP] = catch_ups[0]",
            "dict.fromkeys(row[CATCH_UP] for row in rows.values() if CATCH_UP in row)": (
                "row[CATCH_UP] for row in rows.values() if CATCH_UP in row"
            ),
        },
    ),
    *of(
        "clients/stacking/requests.py",
        A_FEDPD,
        {
            "one if isinstance(one, Tensor) else 0.0 * like for": "vectors[0] for",
            '"layout", CATCH_UP)': '"layout")',
        },
    ),
    *of(
        "fl_strategies/server/nodes.py",
        "tests/test_hosts.py tests/test_host_claims.py tests/test_strategy.py",
        {
            "if client < self.population or client in self._node_of:": "if False:",
            "population != self.population": "False",
            "len({*ids}) < len(ids)": "False",
            "self._waiting.pop(node, None)": "pass",
        },
    ),
    *of(
        "fl_strategies/server/checkpoints.py",
        "tests/test_checkpoints.py tests/test_checkpoint_folders.py tests/test_resuming.py",
        {
            "sorted(self._held)[-self.keep :]": "sorted(self._held)[: self.keep]",
            "-value if self.smaller else value": "value",
            "if version != VERSION:": "if False:",
            "if found := self.rounds():": "if found := []:",
        },
    ),
    *of(
        "fl_strategies/server/run.py",
        "tests/test_checkpoints.py tests/test_checkpoint_folders.py tests/test_resuming.py"
        " tests/test_strategy.py",
        {
            "self.rounds_before += self.round": "self.rounds_before += 1",
            "elif before != self.id:": "elif False:",
            "if ours.keys() != saved.keys():": "if False:",
        },
    ),
    # ---- clients: training, oracles, state -----------------------------------------------------
    *of(
        "clients/learning/solvers.py",
        "tests/test_solvers.py tests/test_fedbcd.py",
        {
            "along.add_(w, alpha=self.decay)": "pass",
            ".mul_(self.momentum).add_(along)": ".add_(along)",
            "alpha=-self.rate)": "alpha=-0.5 * self.rate)",
            "if self.nesterov else velocity": "if False else velocity",
            "model.vector.add_(here - before,": "model.vector.add_(before - here,",
            "model.vector.clamp_(-training.box, training.box)": "pass",
            "if steps == limit:": "if steps > limit:",
            "rng.integers(1, training.epochs, endpoint=True)": "rng.integers(1, training.epochs)",
            "if residual <= training.residual:": "if False:",
            "centre - slope / pull": "centre + slope / pull",
            " and not (half and subproblem.bends)": "",
            "vector.lerp_(centre, rate * pull)": "vector.lerp_(centre, rate)",
            "vector.add_(slope, alpha=-rate)": "vector.add_(slope, alpha=rate)",
            "losses.dot(losses.new_tensor(sizes)) / sum(sizes)": "losses.mean()",
        },
    ),
    *of(
        "clients/learning/oracle.py",
        "tests/test_oracle.py tests/test_solvers.py tests/test_problem.py tests/test_fedpd.py"
        " tests/test_fedpd_rules.py tests/test_pfedme.py tests/test_per_fedavg.py"
        " tests/test_ditto.py tests/test_weight_decay.py tests/test_ceilings.py"
        " tests/test_local.py",
        {
            "self._decayed(new) - before": "self._decayed(new) + before",
            "product + self.training.ridge * v if": "product if",
            "gradient + self.training.ridge * w if": "gradient.clone() if",
            "limit or epochs * per_epoch": "epochs * per_epoch",
            "self._gradient(old, inputs, targets)": "self._gradient(new, inputs, targets)",
        },
    ),
    *of(
        "clients/base.py",
        "tests/test_local.py tests/test_ceilings.py tests/test_bridge.py tests/test_fedadmm.py"
        " tests/test_fedpd.py tests/test_fedpd_skipping.py tests/test_replies.py",
        {
            "if asked_for != self.algorithm:": "if False:",
            "len(self.rounds(config)) * self.most_steps(config)": "self.most_steps(config)",
            "received._replace(theta=step.upload, catch_up=0.0)": "received",
            "int(rng.integers(2**63))": "0",
            '{**config, "round": number}': '{**config, "round": 0}',
        },
    ),
    *of(
        "clients/metrics.py",
        "tests/test_fedpd.py tests/test_fedpd_skipping.py tests/test_replies.py",
        {"sum(one.steps for one in solved)": "last.steps"},
    ),
    *of(
        "clients/keeping.py",
        "tests/test_state.py tests/test_fedadmm.py tests/test_checkpoints.py",
        {
            'config.get("acked-round"))[1]': "None)[1]",
            "Kept(nonce=fresh_nonce())": 'Kept(nonce="0")',
            'str(config.get("run-id", ""))': '""',
            "if fields is not None and (missing := names - fields.keys()):": "if missing := set():",
        },
    ),
    *of(
        "clients/learning/sharing.py",
        "tests/test_sharing.py tests/test_problem.py tests/test_flat_model.py",
        {
            "t.requires_grad and n in shared": "n in shared",
            "n not in parameters and n in shared": "n not in parameters",
            "n in parameters and not t.requires_grad": "not t.requires_grad",
            "shared |= {n for": "shared &= {n for",
            'fnmatchcase(n, f"{pattern}.*")': "False",
            "name in chosen.difference(*out)": "name in chosen",
            "if into else set(names)": "if into else set()",
            'raise ValueError(f"the model has no {one.__name__}")': "pass",
        },
    ),
    *of(
        "fl_strategies/messages/description.py",
        "tests/test_sharing.py",
        {"sha.update(np.ascontiguousarray(array).data)": "pass"},
    ),
    *of(
        "clients/learning/model.py",
        "tests/test_sharing.py tests/test_problem.py tests/test_flat_model.py",
        {
            "values = self._first if arrays is None else arrays": "values = self._first",
            "if name in roles.travelling]": "]",
            "return hashlib.sha256(text.encode()).hexdigest()[:16] if own else": "return",
            "self.shared + [p for": "[p for",
        },
    ),
    *of(
        "clients/learning/samples.py",
        "tests/test_streams.py tests/test_samples.py",
        {
            "self._inside = self._states()\n            self._restore(outside)": "pass",
            "generator.manual_seed(seed)": "pass",
            "        random.seed(seed)\n": "",
            "np.random.seed(seed % 2**32)": "pass",
            "for generator in own if generator is not None": "for generator in own[:0]",
            "if len(names) != 1:": "if not names:",
            "if rest and parameters.keys() >= rest.keys():": "if False:",
            "tensor.is_floating_point() or any(one is loss for one in OF_NUMBERS)": "False",
            '["C", "W"]': '["C"]',
        },
    ),
    *of(
        "clients/learning/streamed.py",
        "tests/test_streams.py",
        {
            "if batch_size == 0 or (own is not None and batch_size != own):": "if False:",
            "self.samples / (self.data.batch_size or 1)": "self.samples",
            "rng.permutation(len(self)).tolist()": "range(len(self))",
            "value.to(like.device, like.dtype if": "value.to(like.device, value.dtype if",
        },
    ),
    *of(
        "clients/node/state.py",
        "tests/test_state.py tests/test_state_files.py tests/test_fedadmm.py"
        " tests/test_checkpoints.py tests/test_checkpoint_folders.py tests/test_resuming.py",
        {
            "if acked_round not in rounds:": "if not rounds:",
            "acked_round = rounds[-1]": "acked_round = rounds[0]",
            "version != standing and version not in kept_rounds": "version != standing",
            "if version != standing and": "if version < standing and",
            "if client != self.client_id:": "if False:",
            "if asked.run != written.run:": "if False:",
            "json.dumps(asdict(owner)).encode(), new=True": "json.dumps(asdict(owner)).encode()",
        },
    ),
    *of(
        "clients/request.py",
        "tests/test_strategy.py tests/test_local.py tests/test_weight_decay.py"
        " tests/test_ceilings.py tests/test_laws.py tests/test_composition.py",
        {
            "purpose, number, client)": "purpose, number)",
            "purpose, number,": "purpose, 0,",
            "if not largest <= config": "if largest <= config",
        },
    ),
    *of(
        "clients/moon.py",
        "tests/test_moon.py tests/test_moon_features.py",
        {
            "model.vector.copy_(state.w)": "pass",
            "buffer.copy_(piece.view_as(buffer))": "pass",
            "loss + self.mu * terms": "loss - self.mu * terms",
            "    problem.model.module.eval()\n    features": "    features",
            "moon.State(made.upload, stat": "moon.State(theta, stat",
            "self.labels[targets])": "targets)",
        },
    ),
]
