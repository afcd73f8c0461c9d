"""Check Flower's own strategies by ``fl_strategies.testing``, and write what is found on the page.

    python -m simulations.lab.findings

The table stands between two marks of ``notebooks/pages/testing.md``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

import flwr
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import strategy as flowers
from flwr.serverapp.strategy import Strategy

from fl_strategies.testing import STRATEGY_LAWS, Finding, check_strategy, numpy_app
from simulations.lab.command_line import Command

PAGE = Path(__file__).parents[2] / "notebooks/pages/testing.md"
MARKS = "<!-- found -->\n", "<!-- end -->\n"

Made = Callable[..., Strategy]


def around(wrapper: Callable[..., Strategy], *settings: float) -> Made:
    """Return the maker of a privacy wrapper around Flower's FedAvg."""
    return lambda: wrapper(flowers.FedAvg(), *settings)


STRATEGIES: dict[str, tuple[Made, ClientApp]] = {
    **{
        name: (getattr(flowers, name), numpy_app())
        for name in (
            *("FedAvg", "FedAvgM", "FedAdagrad", "FedAdam", "FedYogi", "FedMedian"),
            *("FedTrimmedAvg", "Krum", "MultiKrum", "Bulyan"),
        )
    },
    "FedProx": (lambda: flowers.FedProx(proximal_mu=0.1), numpy_app()),
    "QFedAvg": (lambda: flowers.QFedAvg(client_learning_rate=0.1), numpy_app()),
    "FedAvg of 3 in 5 clients": (lambda: flowers.FedAvg(fraction_train=0.6), numpy_app()),
    "server-side fixed clipping": (
        around(flowers.DifferentialPrivacyServerSideFixedClipping, 0.1, 1.0, 5),
        numpy_app(),
    ),
    "server-side adaptive clipping": (
        around(flowers.DifferentialPrivacyServerSideAdaptiveClipping, 0.1, 5),
        numpy_app(),
    ),
    "client-side fixed clipping": (
        around(flowers.DifferentialPrivacyClientSideFixedClipping, 0.1, 1.0, 5),
        numpy_app([fixedclipping_mod]),
    ),
    "client-side adaptive clipping": (
        around(flowers.DifferentialPrivacyClientSideAdaptiveClipping, 0.1, 5),
        numpy_app([adaptiveclipping_mod]),
    ),
}
"""Strategies by name, each with clients that it can work with."""


def found() -> dict[str, list[Finding]]:
    """Return what is found of each strategy, by name."""
    return {
        name: check_strategy(make, app=app, on_fail="report")
        for name, (make, app) in STRATEGIES.items()
    }


def table(findings: dict[str, list[Finding]]) -> str:
    """Return the table in Markdown: a line for each law and kind of failure, with an example."""
    lines = ["| law | fail | for example |", "|---|---|---|"]
    for place, law in enumerate(STRATEGY_LAWS):
        kinds: dict[str, list[str]] = {}
        reasons: dict[str, str] = {}
        for name, each in findings.items():
            if each[place].outcome == "failed":
                kinds.setdefault(without_numbers(each[place].reason), []).append(name)
                reasons[name] = each[place].reason
        left_out = [each[place].reason for each in findings.values() if skipped(each[place])]
        without = f"not applicable to {len(left_out)}: {left_out[0]}" if left_out else ""
        if not kinds:
            lines.append(f"| `{law.__name__}` | none | {escaped(without)} |")
        for names in kinds.values():
            fail = "all" if len(names) == len(findings) else ", ".join(names)
            example = escaped(f"{names[0]}: {reasons[names[0]]}")
            lines.append(f"| `{law.__name__}` | {fail} | {example} |")
    return "\n".join(lines) + "\n"


def skipped(finding: Finding) -> bool:
    """Whether the law says nothing of the strategy."""
    return finding.outcome == "not applicable"


def without_numbers(reason: str) -> str:
    """Return what reasons of a kind have in common."""
    return " ".join(word for word in reason.split() if not re.search(r"\d", word))


def escaped(text: str) -> str:
    """Return ``text`` as Markdown shows it in a cell of a table."""
    return re.sub(r"([|`*_\\\[\]{}<>])", r"\\\1", " ".join(text.split()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Check the strategies, and write the table."""
    parser = Command("findings", __doc__)
    parser.add_argument("--output", type=Path, default=PAGE, help="page whose table is replaced")
    page = parser.read(arguments).output
    with parser.explained():
        begin, end = MARKS
        before, _, rest = page.read_text().partition(begin)
        _, _, after = rest.partition(end)
        findings = found()
        said = f"Flower {flwr.__version__}, {date.today().isoformat()}, {len(findings)} strategies:"
        page.write_text(f"{before}{begin}\n{said}\n\n{table(findings)}\n{end}{after}")
        print(page)


if __name__ == "__main__":
    main()
