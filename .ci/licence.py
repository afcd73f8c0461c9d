"""The licence in METADATA: Flower's apps name a file, whose whole text hatchling would write there.

An index wants the SPDX name and the files. hatchling calls a hook only if a field is dynamic.
"""

from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Licence(MetadataHookInterface):
    """Gives the licence by its SPDX name, and as a file of the wheel."""

    def update(self, metadata: dict[str, Any]) -> None:
        metadata |= {"license": "Apache-2.0", "license-files": ["LICENSE"]}
