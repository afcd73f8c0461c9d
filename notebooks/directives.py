"""What the site's pages derive from the code: cards, hyperparameters, paragraphs, API pages."""

import importlib
import inspect
import pkgutil
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from docutils.nodes import Node
from flwr.app import ArrayRecord, Context, Message
from sphinx.util.docutils import SphinxDirective
from torch import nn

from clients import AnyAlgorithmClient, InProcessGrid, OwnTraining, client_app
from fl_strategies import STRATEGIES, FederatedStrategy, Round, testing
from fl_strategies.core.hyperparameters import Hyperparameter
from fl_strategies.parts import PARTS, STAGES, Part, parts_for
from fl_strategies.server.options import Options
from fl_strategies.testing.verdicts import statement

PACKAGES = ("fl_strategies", "clients")


def modules() -> list[str]:
    """Return the names of all modules that have a page: those with public names."""
    found = []
    for package in map(importlib.import_module, PACKAGES):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not info.ispkg and not info.name.endswith("__main__"):
                found.append(info.name)
    return found


def write_api(folder: Path) -> None:
    """Write the page of every module and their list; delete pages of modules that are gone."""
    folder.mkdir(exist_ok=True)
    pages = {
        f"{name}.rst": f"{name}\n{'=' * len(name)}\n\n.. automodule:: {name}\n   :members:\n"
        for name in modules()
    }
    pages["modules.rst"] = module_list(modules())
    for path in folder.glob("*.rst"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def module_list(names: Sequence[str]) -> str:
    """Return the page that lists all modules, by package."""
    lines = ["Modules", "=======", "", "Each module's docstring, and all its names. Of them only"]
    lines += [
        "those on the pages of public names stay as they are from release to release.",
        "",
    ]
    packages = dict.fromkeys(name.rpartition(".")[0] for name in names)
    for package in packages:
        lines += [package, "-" * len(package), "", ".. toctree::", "   :maxdepth: 1", ""]
        lines += [f"   {name}" for name in names if name.rpartition(".")[0] == package] + [""]
    return "\n".join(lines)


def escaped(line: str) -> str:
    """Return the line with |S|, a number of clients, no longer a name to be substituted."""
    pieces = re.split(r"(``.*?``)", line)
    return "".join(p if p.startswith("``") else p.replace("|", r"\|") for p in pieces)


class FromCode(SphinxDirective):
    """A directive made of the code; its own content is for readers of the file."""

    has_content = True
    required_arguments = 1
    optional_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[Node]:
        return self.parse_text_to_nodes("\n".join(self.lines()))

    def lines(self) -> list[str]:
        """Return the content, in the language of the page."""
        raise NotImplementedError


class Algorithm(FromCode):
    """``{algorithm} fedadmm``: what there is to know of it in a few lines."""

    def lines(self) -> list[str]:
        return card(self.arguments[0])


def card(name: str) -> list[str]:
    """Return the table at the head of an algorithm's page, in MyST."""
    strategy = STRATEGIES[name]
    about, module = strategy.card, strategy.__module__
    rows = {
        "Use it when": about.when,
        "Strategy": f"`fl_strategies.{strategy.__name__}`, `--algorithms {name}` in commands",
        "Clients keep": about.keeps,
        "A client receives and sends": traffic(name),
        "Paper": about.paper + link(about.arxiv),
        "Source": f"[{module}](/notebooks/api/{module}.rst)",
    }
    return ["| | |", "|---|---|", *(f"| **{key}** | {text} |" for key, text in rows.items())]


def link(arxiv: str) -> str:
    """Return the link to a paper on arXiv."""
    return f", [arXiv:{arxiv}](https://arxiv.org/abs/{arxiv})" if arxiv else ""


class Algorithms(FromCode):
    """``{algorithms}``: every algorithm in a line, and when to use it."""

    required_arguments = 0

    def lines(self) -> list[str]:
        head = ["| algorithm | what it does | use it when |", "|---|---|---|"]
        cards = ((name, strategy.card) for name, strategy in STRATEGIES.items())
        return head + [f"| [{c.title}]({name}.md) | {c.about} | {c.when} |" for name, c in cards]


def traffic(name: str) -> str:
    """Return in words what one client downloads and uploads in a communication round."""
    strategy = STRATEGIES[name]
    vectors = 1 + len(strategy.extra_vectors)
    what = "the model" if vectors == 1 else f"the model and {', '.join(strategy.extra_vectors)}"
    times = "" if vectors == 1 else f"{vectors} "
    each_way = f"{what}: {times}d numbers each way, {4 * vectors}d bytes in float32"
    if strategy.for_client is not FederatedStrategy.for_client:
        return f"{each_way}; each client receives d numbers more"
    if strategy.catch_up is FederatedStrategy.catch_up:
        return each_way
    return f"{each_way}; a client that missed a round receives d numbers more"


class AroundLoops(FromCode):
    """``{around-loops}``: which algorithms run around a training loop of one's own."""

    required_arguments = 0

    def lines(self) -> list[str]:
        head = ["| algorithm | around a loop of your own |", "|---|---|"]
        misses = {name: around_a_loop(name) for name in STRATEGIES}
        texts = {
            name: f"no: it asks for {what}" if what else "yes" for name, what in misses.items()
        }
        titles = {name: STRATEGIES[name].card.title for name in texts}
        return head + [f"| [{titles[n]}](algorithms/{n}.md) | {texts[n]} |" for n in texts]


def around_a_loop(name: str) -> str:
    """Return what the algorithm asks a client for that a loop does not give; "" if nothing.

    It is found by a round of one client.
    """

    def loop(module: nn.Module, config: Any) -> None:
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        module(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    replies: list[Message] = []

    def heard(request: Message, reply: Message) -> Message:
        replies.append(reply)
        return reply

    def client_fn(context: Context) -> AnyAlgorithmClient:
        problem = OwnTraining(nn.Linear(1, 1), loop, 1)
        return AnyAlgorithmClient(problem)

    strategy = STRATEGIES[name](fraction_evaluate=0.0, quiet=True, min_replies=1)
    start = ArrayRecord(nn.Linear(1, 1).state_dict())
    strategy.start(InProcessGrid(client_app(client_fn), 1, fault=heard), start, 1)
    reply = replies[-1]
    if not reply.has_error():
        return ""
    found = re.search(
        r"asks its clients for (.*), which a training loop|one's own does not use (.*): what",
        reply.error.reason,
    )
    if found is None:
        raise AssertionError(f"{name}: {reply.error.reason}")
    return found[1] or found[2]


class Contracts(FromCode):
    """``{contracts}``: what each algorithm asks of a client, besides what all ask."""

    required_arguments = 0

    def lines(self) -> list[str]:
        head = ["| client | keys of a request | further arrays | upload | metrics | keeps |"]
        return [*head, "|---|---|---|---|---|---|", *(contract(name) for name in STRATEGIES)]


def contract(name: str) -> str:
    """Return the row of an algorithm."""
    strategy = STRATEGIES[name]()
    module = STRATEGIES[strategy.runs or name].__module__
    cells = [
        f"[{strategy.card.title}](/notebooks/api/{module}.rst)",
        code(told(strategy)),
        code(strategy.extra_vectors),
        "changes" if strategy.uploads_changes else "models",
        code(strategy.scalar_bounds),
        strategy.card.keeps,
    ]
    return f"| {' | '.join(cells)} |"


def told(strategy: FederatedStrategy) -> list[str]:
    """Return the keys of a request that are the algorithm's own."""
    theta = np.zeros(1)
    round = Round(1, theta, connected=(0,), asked=(0,), population=1)
    state = strategy.on_connect(strategy.first_state(theta), (0,))
    state = strategy.begin(state, round, num_rounds=1)
    declared = [found.sent for found in strategy.declarations.values() if found.sent]
    return list(dict.fromkeys([*declared, *strategy.client_config(state, round, 0)]))


def code(names: Iterable[str]) -> str:
    """Return the names as code."""
    return ", ".join(f"`{name}`" for name in names)


class Laws(FromCode):
    """``{laws} STRATEGY_LAWS``: each law in words."""

    def lines(self) -> list[str]:
        return laws(self.arguments[0])


def laws(name: str) -> list[str]:
    """Return the table of laws, as their docstrings state them, in MyST."""
    found = getattr(testing, name)
    rows = [f"| `{law.__name__}` | {marked(statement(law))} |" for law in found]
    return ["| law | what it says |", "|---|---|", *rows]


class Hyperparameters(FromCode):
    """``{hyperparameters} fedadmm``: its own, as they are declared."""

    def lines(self) -> list[str]:
        strategy = STRATEGIES[self.arguments[0]]
        own = {name: strategy.declarations[name] for name in strategy.hyperparameters()}
        found = declared(own) if own else [f"{strategy.card.title} has none of its own."]
        return [*found, *printed(strategy)]


def printed(strategy: type[FederatedStrategy]) -> list[str]:
    """Return the rules that differ from the defaults: the paper's and its authors' code's."""
    lines = []
    for whose, form in (("The paper", "paper"), ("The authors' code", "authors")):
        if rule := getattr(strategy, f"{form}_rule", None):
            said = [f"`{strategy.__name__}.{form}_rule`: {settings(rule)}"]
            if local := getattr(strategy, f"{form}_local", None):
                said.append(f"`{form}_local`: {settings(local)}")
            lines += ["", f"{whose}: {'; '.join(said)}."]
    return lines


def settings(found: Mapping[str, object]) -> str:
    """Return the settings as code."""
    return ", ".join(f"`{name} = {value!r}`" for name, value in found.items())


class EveryStrategy(FromCode):
    """``{options}``: those of every strategy."""

    required_arguments = 0

    def lines(self) -> list[str]:
        return declared(Options.declarations)


class Parts(FromCode):
    """``{parts} server_step``: those of a stage."""

    def lines(self) -> list[str]:
        return parts(self.arguments[0])


def parts(stage: str) -> list[str]:
    """Return the table of a stage's parts, in MyST."""
    lines = ["| part | name | what it does | paper |", "|---|---|---|---|"]
    for part in parts_for(stage).values():
        source = f"[{part.__name__}](/notebooks/api/{part.__module__}.rst)"
        lines.append(f"| {source} | `{part.name}` | {part.about} | {part.paper} |")
    return lines


class PartsHyperparameters(FromCode):
    """``{parts-hyperparameters}``: those of every part, by stage."""

    required_arguments = 0

    def lines(self) -> list[str]:
        lines = []
        for part in PARTS.values():
            if part.declarations:
                lines += [
                    f"`{part.__name__}` ({part.stage}):",
                    "",
                    *declared(part.declarations),
                    "",
                ]
        return lines


class Combinations(FromCode):
    """``{combinations}``: which part works with which algorithm."""

    required_arguments = 0

    def lines(self) -> list[str]:
        return combinations()


VARIANTS: dict[str, list[dict[str, Any]]] = {
    "fedadmm": [{}, {"eta": "fraction"}],
    "fedpd": [{}, {"p": 0.5}],
}
"""Hyperparameters on which depends what works with an algorithm."""
UNIFORM: dict[str, Any] = {"weights": "uniform"}


def combinations() -> list[str]:
    """Return the table algorithm x part, from what each declares, and the reasons, in MyST."""
    alike: dict[tuple[object, ...], list[type[Part]]] = {}
    for stage in STAGES:
        for part in parts_for(stage).values():
            needs = part.needs if stage == part.stage else part.needs_elsewhere
            alike.setdefault((stage, *needs), []).append(part)
    heads = [
        ", ".join(p.__name__ if p.stage == stage else f"{p.__name__} ({stage})" for p in group)
        for (stage, *_), group in alike.items()
    ]
    lines = [f"| algorithm | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    reasons: list[str] = []
    for name, strategy in STRATEGIES.items():
        by_samples = strategy.hyperparameters().get("weights") == "samples"
        for options in [{}, UNIFORM] if by_samples else VARIANTS.get(name, [{}]):
            local = {"lr": 0.1} if strategy.uses_local else {}
            rule = strategy(local=local, **options)
            cells = []
            for (stage, *_), (part, *_) in alike.items():
                why = part.refusal(rule, "the algorithm", str(stage))
                if why and why not in reasons:
                    reasons.append(why)
                cells.append(f"refused ({reasons.index(why) + 1})" if why else "works")
            shown = " ".join([f"`{name}`", *(f"`{n}={value!r}`" for n, value in options.items())])
            lines.append(f"| {shown} | {' | '.join(cells)} |")
    return [*lines, "", *(f"{n}. {marked(why)}." for n, why in enumerate(reasons, start=1))]


def declared(found: Mapping[str, Hyperparameter]) -> list[str]:
    """Return the table of what is declared, in MyST."""
    head = ["| name | values | default | meaning |", "|---|---|---|---|"]
    return [*head, *(row(name, each) for name, each in found.items())]


def row(name: str, found: Hyperparameter) -> str:
    """Return a hyperparameter's row, in MyST."""
    default = found.default
    shown = f'"{default}"' if isinstance(default, str) else str(default)
    if isinstance(default, Mapping | tuple) and not default:
        shown = "none"
    cells = [f"`{name}`", f"`{found.range}`", f"`{shown}`", marked(found.about)]
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


DEFAULTS = "simulations/lab/notes/comparisons.md"


class Board(FromCode):
    """``{board} fedadmm``: its row of the table of accuracies with default settings."""

    def lines(self) -> list[str]:
        text = (Path(__file__).parents[1] / DEFAULTS).read_text()
        head = re.search(r"^\| algorithm \|.*\n\|---.*$", text, re.MULTILINE)
        found = re.search(rf"^\| {self.arguments[0]} \|.*$", text, re.MULTILINE)
        if head is None or found is None:
            raise self.error(f"{DEFAULTS} has no row of {self.arguments[0]}")
        about = "Final test accuracy in per cent with the default settings: "
        link = f"[the table of all algorithms](/{DEFAULTS}#accuracy-with-default-settings)."
        return [*head[0].split("\n"), found[0], "", about + link]


class Paragraphs(FromCode):
    """``{paragraphs} module words``: those of its docstring that begin with one of the words.

    A list right after such a paragraph belongs to it.
    """

    def lines(self) -> list[str]:
        found = paragraphs(self.arguments[0], shlex.split(self.arguments[1]))
        if not found:
            raise self.error(f"{self.arguments[0]} has no such paragraph: {self.arguments[1]}")
        return found


def paragraphs(module: str, words: Sequence[str]) -> list[str]:
    """Return the paragraphs of the module's docstring that begin with ``words``, in MyST."""
    blocks = inspect.cleandoc(importlib.import_module(module).__doc__ or "").split("\n\n")
    lines: list[str] = []
    taken = False
    for block in blocks:
        taken = block.startswith(tuple(words)) or (taken and block.startswith("- "))
        if taken:
            lines += [*map(marked, block.split("\n")), ""]
    return lines


def marked(line: str) -> str:
    """Return a docstring's line as Markdown that shows the same."""
    line = re.sub(r"``(.*?)``", r"`\1`", line)
    pieces = re.split(r"(`.*?`)", line)
    return "".join(p if p.startswith("`") else re.sub(r"([*_$<>\\])", r"\\\1", p) for p in pieces)
