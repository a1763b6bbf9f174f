"""The secondary tier in an object store.

One bucket serves any number of engines and models; each namespace has its own names under a prefix, and what lies under
it shares one capacity.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

from kvtier.base import Locality
from kvtier.errors import ConfigError
from kvtier.settings import parse_settings
from kvtier.tiering.kit.backend import Rows
from kvtier.tiering.kit.blobs import BlobPlace, BlobTier
from kvtier.tiering.kit.place import TierFinding
from kvtier.tiering.obj.blobs import ObjBlobs
from kvtier.tiering.obj.settings import ObjSettings
from kvtier.tiering.obj.target import Service

UNSEEN = {
    Service.HTTP: "a web server lists nothing: what is there cannot be seen without an engine's keys",
    Service.MEMORY: "memory:// is in one engine's memory: no other process can reach it",
}
"""Services whose objects cannot be seen without an engine, and why."""


class ObjTier(BlobTier):
    """Objects in a bucket that any number of engines may share; the arguments are those of every ``BlobTier``."""

    own_settings: ClassVar = ObjSettings
    locality: ClassVar[Locality | None] = Locality.REMOTE
    place_setting: ClassVar[str] = "url"

    @staticmethod
    def get_tier_type() -> str:
        return "obj"

    @classmethod
    def open_blobs(cls, own: Mapping[str, object], clock: Callable[[], float], rows: Rows | None) -> ObjBlobs:
        del rows  # the client takes any memory
        return ObjBlobs(parse_settings(ObjSettings, own, "tier 'obj'"), clock)

    @classmethod
    def open_place(cls, own: Mapping[str, object]) -> BlobPlace:
        settings = parse_settings(ObjSettings, own, "tier 'obj'")
        target = settings.target
        if target.service in UNSEEN:
            raise ConfigError("PLACE", settings.url, UNSEEN[target.service])
        if target.service is Service.FILE and not Path(target.bucket).is_dir():
            remedy = "there is no such directory: give the url of an obj tier"
            raise ConfigError("PLACE", settings.url, remedy)
        return super().open_place(own)

    @classmethod
    def probe(cls, own: Mapping[str, object]) -> list[TierFinding]:
        settings = parse_settings(ObjSettings, own, "tier 'obj'")
        folder = Path(settings.target.bucket)
        if settings.target.service is Service.FILE and not folder.is_dir():
            return [_probe_missing_folder(settings.url, folder)]
        return super().probe(own)


def _probe_missing_folder(url: str, folder: Path) -> TierFinding:
    """Return whether ``folder``, which is no directory, could be made."""
    existing = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
    if not existing.is_dir():
        return TierFinding(is_good=False, text=f"{url}: {existing} is no directory: give another place")
    return TierFinding(is_good=True, text=f"{url} will be made", is_note=True)
