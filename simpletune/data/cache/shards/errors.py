"""Errors for a store's failure and for a damaged sample."""

from __future__ import annotations

from simpletune.data.cache.shards.shard_store import ShardStore
from simpletune.system.options import UserError
from simpletune.system.stores.store import StoreError


class DamagedSample(Exception):
    """Report that a sample's bytes differ from what was stored."""


class StoreErrorsExplained:
    """Turn a store's failure into a message for the user, within this context."""

    def __init__(self, shelf: ShardStore):
        self.shelf = shelf

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StoreError):
            raise UserError(
                f"output.cache: {error}. Check the URL, the credentials and the network, then continue with --resume "
                "latest, or start again; what was encoded is kept"
            ) from None
