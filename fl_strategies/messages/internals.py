"""What is imported of Flower's internals, which a new version of Flower may move: here alone."""

from flwr.common.constant import ErrorCode, SType
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.task_identity import TaskIdentity

REPLY_LOST = "Message %s objects unavailable: %s"
"""What Flower 1.43 logs, and nothing else, of a reply whose content was not uploaded whole."""

__all__ = [
    "REPLY_LOST",
    "ErrorCode",
    "ObjectPushError",
    "RecordDictProto",
    "SType",
    "TaskIdentity",
    "recorddict_from_proto",
    "recorddict_to_proto",
]
