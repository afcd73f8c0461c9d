"""Mutants of what trains clients at once. See mutants.py."""

from trials import of

SOLVERS = "tests/test_stacked.py -x -k 'every_solver or pfedme_measures'"
ALGORITHMS = "tests/test_stacked.py -x -k 'every_algorithm_on or variants or penalty or chunk'"
PATH = (
    "tests/test_stacked.py tests/test_stacked_alone.py tests/test_stacked_choice.py"
    " -x -k 'not every_algorithm and not every_solver'"
)

MOON = "tests/test_stacked_moon.py -x"
DROPOUT = "tests/test_stacked.py tests/test_stacked_alone.py -x -k 'dropout or masks'"

STACKS = [
    *of(
        "clients/stacking/optimizers.py",
        SOLVERS,
        {
            "g += self.part(self.slope, k)": "pass",
            "(w - self.part(self.centre, k))": "w",
            "else closure(state.x)[0]": "else state.g",
            "np.minimum(1.0, size / sizes)": "np.minimum(1.0, sizes / size)",
            "self.w[k:] = done": "pass",
        },
    ),
    *of(
        "clients/stacking/solve.py",
        SOLVERS,
        {
            "before[:k] = here": "pass",
            "self.residual[who] <= self.training.residual": "self.residual[who] < 0.0",
            "g = g + self.training.ridge * at": "pass",
            "self._work.states[number][epochs - 1]": "self._work.states[number][-1]",
            "(at >= (epochs - 1) * per_epoch)": "(at >= 0)",
        },
    ),
    *of(
        "clients/stacking/plans.py",
        SOLVERS,
        {
            "limits.append(limit or count * batches)": "limits.append(count * batches)",
            "epoch * per_epoch[owner], lengths)": "epoch, lengths)",
            "return [np.arange(samples)] * epochs": "return [rng.permutation(samples)] * epochs",
        },
    ),
    *of("clients/stacking/stack.py", PATH, {"if not averages(self._loss)": "if False"}),
    *of(
        "clients/stacking/stack.py",
        ALGORITHMS,
        {
            "share * self.gradient(w, piece)[0]": "self.gradient(w, piece)[0]",
            "torch.where(batches.weights > 0.0, right, 0)": "right",
            "gradient += torch.autograd.grad(values.sum(), at)[0]": "pass",
            "np.clip(sizes - start, 0, stop - start)": "np.clip(sizes, 0, stop - start)",
            "samples + self._starts[who][:, None]": "samples",
        },
    ),
    *of(
        "clients/stacking/oracle.py",
        ALGORITHMS,
        {
            "vector=after.vector - before.vector": "vector=after.vector",
            "np.divmod(used + len(turns), per_epoch)": "np.divmod(used, per_epoch)",
            "training = on_all(self.training, int(counts.max()))": "training = self.training",
        },
    ),
    *of(
        "clients/stacking/moon.py",
        MOON,
        {
            "np.repeat(self._starts - starts, self.sizes)": "np.repeat(starts, self.sizes)",
            "self._rows, self._starts = None, starts": "self._rows = None",
            "self.model.views(theta[at]), NONE": "self.model.views(theta[at * 0]), NONE",
            "self._buffers_of(statistics))": "NONE)",
            "tau[at] if isinstance": "tau[at * 0] if isinstance",
            "(self.model.views(w),": "(self.model.views(theta[at]),",
            "[torch.from_numpy(owners).to(like.device), 0]": "[0, 0] + 0 * self._row_at",
            "losses + mu * terms": "losses - mu * terms",
            "return 3 * len(problem)": "return len(problem)",
            "self._q.index_select(0, samples.reshape(-1))": (
                "self._q.index_select(0, self._row_at.take(samples.reshape(-1)))"
            ),
        },
    ),
    *of("clients/stacking/fit.py", MOON, {"form_of(type(largest)).bytes_of(largest.problem)": "0"}),
    *of(
        "clients/stacking/masks.py",
        DROPOUT,
        {
            "manual_seed(seed)": "manual_seed(0)",
            "row[:size].bernoulli_": "row.bernoulli_",
            "x * noise.div_(1.0 - p)": "x * noise",
            "x.movedim(in_dims[0], 0)": "x",
            "dropouts(module) if layer.training]": "dropouts(module)]",
            "            del layer.forward": "            pass",
        },
    ),
    *of(
        "clients/stacking/solve.py",
        DROPOUT,
        {"stack.masks.of(numbers[:k],": "stack.masks.of(np.arange(k),"},
    ),
    *of(
        "clients/stacking/fit.py",
        DROPOUT,
        {
            "if size > CHUNK else": "if False else",
            'if training.solver == "delta-sgd" or': "if",
        },
    ),
    *of(
        "clients/stacking/layers.py",
        DROPOUT,
        {"if layer.training and layer.p else x": "if layer.p else x"},
    ),
    *of(
        "clients/stacking/layers.py",
        MOON,
        {"features = inputs if place == places[-1]": "features = inputs if place == places[0]"},
    ),
    *of(
        "clients/stacking/fit.py",
        MOON,
        {"obstacle(client.problem, form_of(type(client)))": "obstacle(client.problem)"},
    ),
    *of(
        "clients/stacking/fit.py",
        PATH,
        {
            "member[0].check(member[1])": "pass",
            "order = order[alone:]": "pass",
            "min(most, memory // (sum(client_bytes(problem, int(size))) + further))": "most",
            "if CLIENTS.get(client.algorithm) is not type(client):": "if False:",
        },
    ),
    *of(
        "clients/stacking/choice.py",
        PATH,
        {
            'row["d"] >= d)': 'row["d"] <= d)',
            "costs[: measured[0]] = costs[measured[0]]": "pass",
            "cost, one_by_one = work.sum() / GAIN": "cost, one_by_one = work.sum() * 99",
        },
    ),
]
