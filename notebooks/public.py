"""The public names of the packages: what the API's first pages say of each, and an example."""

import importlib
import inspect
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from directives import FromCode, escaped, modules
from examples import example
from sphinx.pycode import ModuleAnalyzer

from clients import FederatedClient
from fl_strategies import STRATEGIES, FederatedStrategy
from fl_strategies.parts import PARTS


class Names(FromCode):
    """``{names} fl_strategies History``: signature, one line and an example of each public name.

    A registry (``STRATEGIES``, ``CLIENTS``, ``PARTS``) stands for itself and its members.
    """

    def lines(self) -> list[str]:
        package, names = self.arguments[0], self.arguments[1].split()
        body = [line for name in covered(package, names) for line in entry(package, name)]
        return ["```{eval-rst}", *body, "```"]


def covered(package: str, names: Iterable[str]) -> list[str]:
    """Return the names that an enumeration of names covers, each once."""
    module = importlib.import_module(package)
    found: list[str] = []
    for name in names:
        thing = getattr(module, name)
        members = thing.values() if isinstance(thing, Mapping) else ()
        classes = [each.__name__ for each in members if isinstance(each, type)]
        found += [name, *(each for each in classes if each in module.__all__)]
    return list(dict.fromkeys(found))


def entry(package: str, name: str) -> list[str]:
    """Return the entry of a public name, in reStructuredText."""
    thing = getattr(importlib.import_module(package), name)
    kind = "class" if is_class(thing) else "function" if inspect.isfunction(thing) else "data"
    line = escaped(one_line(package, name, thing))
    if page := document(package, name, thing):
        line = f"{line} :doc:`More <{page}>`"
    text = "" if kind == "data" else signature(thing)
    about = [line, "", *shown_example(package, name)]
    return [f".. py:{kind}:: {package}.{name}{text}", "", *(f"   {one}" for one in about), ""]


def shown_example(package: str, name: str) -> list[str]:
    """Return the example of a public name, in reStructuredText; a link leads to its program."""
    code, document = example(package, name)
    language = "pycon" if code.startswith(">>>") else "python"
    elsewhere = document.rpartition("/")[2] != package.rpartition(".")[2]
    source = [f"From :doc:`{document}`.", ""] if document and elsewhere else []
    return [
        f".. code-block:: {language}",
        "",
        *(f"   {one}" for one in code.split("\n")),
        "",
        *source,
    ]


def signature(thing: Any) -> str:
    """Return the signature without annotations: a strategy's or client's options as ``options``."""
    if getattr(thing, "_is_protocol", False) or derives(thing, BaseException):
        return ""
    shown = [
        each.replace(annotation=each.empty) for each in inspect.signature(thing).parameters.values()
    ]
    options = inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)
    if derives(thing, FederatedStrategy):
        shown = [*(each for each in shown if each.name in thing.hyperparameters()), options]
    elif derives(thing, FederatedClient) and thing is not FederatedClient:
        shown = [*shown[:2], options]
    text = (
        str(inspect.Signature(shown))
        .replace("mappingproxy({})", "{}")
        .replace("=<factory>", "=...")
    )
    return re.sub(
        r"=<function \S*?([\w<>]+) at 0x\w+>", lambda m: "=" + m[1].replace("<lambda>", "..."), text
    )


def is_class(thing: Any) -> bool:
    """Whether ``thing`` is a class of one of the packages, not the name of a type."""
    return inspect.isclass(thing) and thing.__module__.startswith(("fl_strategies", "clients"))


def derives(thing: Any, base: type) -> bool:
    """Whether ``thing`` is a class derived from ``base``."""
    return is_class(thing) and issubclass(thing, base)


def one_line(package: str, name: str, thing: Any) -> str:
    """Return what a name is, in one sentence."""
    if thing in STRATEGIES.values():
        return f"{thing.card.about[0].upper()}{thing.card.about[1:]}."
    if thing in PARTS.values():
        return f"{thing.about[0].upper()}{thing.about[1:]}."
    own = is_class(thing) or inspect.isfunction(thing)
    text = thing.__doc__ if own else attribute_docs(package).get(name)
    first = inspect.cleandoc(text or "").split("\n\n")[0]
    if not first:
        raise ValueError(f"{package}.{name} has no docstring")
    return " ".join(first.split("\n"))


@cache
def attribute_docs(package: str) -> dict[str, str]:
    """Return the docstrings of the package's public names that are neither class nor function."""
    found: dict[str, str] = {}
    for module in (package, *modules()):
        for (scope, name), lines in ModuleAnalyzer.for_module(module).find_attr_docs().items():
            if not scope:
                found.setdefault(name, "\n".join(lines))
    return found


def document(package: str, name: str, thing: Any) -> str:
    """Return the page that says most of a name: an algorithm's, or that of its module, or ""."""
    if thing in STRATEGIES.values():
        return f"/notebooks/pages/algorithms/{thing.algorithm}"
    if is_class(thing) or inspect.isfunction(thing):
        return f"/notebooks/api/{thing.__module__}" if thing.__module__ in modules() else ""
    return ""
