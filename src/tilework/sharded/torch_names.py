"""torch's underscored names for the ways to make a ShardedTensor, which programs call."""

from __future__ import annotations

from typing import Any


class TorchShardedNames:
    """Class methods under their names in torch."""

    __slots__ = ()

    @classmethod
    def _init_from_local_shards(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``init_from_local_shards``; this is torch's name for it."""
        return cls.init_from_local_shards(*args, **kwargs)

    @classmethod
    def _init_from_local_tensor(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``init_from_local_tensor``; this is torch's name for it."""
        return cls.init_from_local_tensor(*args, **kwargs)

    @classmethod
    def _init_from_local_shards_and_global_metadata(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``from_local_shards_and_global_metadata``; this is torch's name for it."""
        return cls.from_local_shards_and_global_metadata(*args, **kwargs)
