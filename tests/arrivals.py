"""A grid whose replies arrive late."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import Message
from problems import CLIENT_OF, make_client_app, quadratics

from clients.node.in_process import InProcessGrid


class Slow(InProcessGrid):
    """Replies of some clients come only when so many looks for replies have been made."""

    def __init__(self, clients: int, looks: dict[int, int], **options: Any) -> None:
        problems = quadratics(clients)
        app = make_client_app(problems, hosts=options.pop("served", None))
        super().__init__(app, clients, **options)
        self.looks, self.due, self.now = looks, dict[str, int](), 0
        self.asked: list[tuple[int, int]] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        ids = list(super().push_messages(messages))
        for message_id, message in zip(ids, messages, strict=True):
            if message.metadata.message_type == "train" and not self.clients:
                client = CLIENT_OF[message.metadata.dst_node_id]
                config = message.content.config_records["config"]
                self.asked.append((int(config["server-round"]), client))  # type: ignore[arg-type]
                self.due[message_id] = self.now + self.looks.get(client, 0)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.now += 1
        ready = [key for key in message_ids if self.due.get(key, 0) < self.now]
        return super().pull_messages(ready)
