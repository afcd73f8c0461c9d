"""The Hub out of reach: said at once and with what to do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pytest
from huggingface_hub import constants

from simulations import data, hub


def answer(head: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the Hub answer by ``head``."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    session = SimpleNamespace(head=head)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: session)


def refuses(*_: Any, **__: Any) -> None:
    raise OSError("no route to host")


def status(code: int) -> Callable[..., Any]:
    return lambda *_, **__: SimpleNamespace(status_code=code)


@pytest.mark.parametrize(
    ("head", "reached"),
    [(status(200), True), (status(404), True), (status(503), False), (refuses, False)],
)
def test_the_hub_is_reached_if_it_answers(
    head: Callable[..., Any], reached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(head, monkeypatch)
    assert hub.reachable() is reached
    with hub.asked_briefly():
        offline = [constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE]
    assert offline == [not reached] * 2
    assert [constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE] == [False, False]


def test_a_hub_that_is_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    answer(lambda *_, **__: over.wait(), monkeypatch)
    monkeypatch.setattr(hub, "HUB_SECONDS", 0.01)
    assert not hub.reachable()
    over.set()


def test_offline_by_wish_the_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(lambda *_, **__: pytest.fail("asked"), monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert not hub.reachable()


@pytest.mark.parametrize("name", data.HUB)
@pytest.mark.parametrize("root", [None, "empty", "missing"])
def test_data_that_cannot_be_had_say_where_to_put_them_and_what_to_restart(
    name: str, root: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real loader is called: it does not wait for a Hub that is known to be out of reach."""
    answer(refuses, monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    shown = {
        None: "unset",
        "empty": tmp_path / "empty",
        "missing": f"{tmp_path}/missing, no folder",
    }
    monkeypatch.delenv("FL_DATA", raising=False)
    if root is not None:
        monkeypatch.setenv("FL_DATA", str(tmp_path / root))
    with pytest.raises(ValueError, match=f"data set '{name}' is neither under FL_DATA ") as error:
        data.load(name, owners=1)  # with an option, so that no other test has loaded it
    told = str(error.value)
    assert f"FL_DATA ({shown[root]})" in told
    assert f"set the environment variable FL_DATA to the folder in which {name}/ has" in told
    assert told.endswith("SuperNode keeps the FL_DATA with which it was started, so restart it")
