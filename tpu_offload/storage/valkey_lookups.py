"""Asks the server of a `valkey` tier which names are stored.

It uses `TOUCH`, so that the server counts what it finds as used, which `EXISTS` does not. A user without `TOUCH` asks
with `EXISTS`, and there is a warning.
"""

import itertools
import logging
from collections.abc import Sequence
from typing import Any, final

from glide_sync import Batch, ClusterBatch, GlideClient, GlideClusterClient, RequestError

_logger = logging.getLogger(__name__)


@final
class StoredNames:
    """Which names are stored on a server.

    Args:
      client: of the server.
      where: the server, for the log.
    """

    def __init__(self, client: GlideClient | GlideClusterClient, where: str) -> None:
        self._client = client
        self._where = where
        self._touches = True  # may be

    def count(self, groups: Sequence[Sequence[bytes]]) -> list[int]:
        """How many names of each group are stored, in one round trip; a use of them, where the user has `TOUCH`.

        Raises:
          GlideError: the server does not answer, or refuses.
        """
        try:
            return self._count(groups)
        except RequestError as e:
            if not self._touches or "touch" not in str(e).lower():  # e.g. no permissions to run the 'touch' command
                raise
        self._touches = False
        found = self._count(groups)
        _logger.warning(
            "storage tier: the user of %s may not TOUCH, so the server evicts first what engines keep in host memory; "
            "allow it",
            self._where,
        )
        return found

    def _count(self, groups: Sequence[Sequence[bytes]]) -> list[int]:
        client = self._client
        if isinstance(client, GlideClusterClient):  # the keys of one request have to be of one node
            cluster_batch = ClusterBatch(is_atomic=False)
            ask_one = cluster_batch.touch if self._touches else cluster_batch.exists
            for group in groups:
                for name in group:
                    ask_one([name])
            found: Any = iter(client.exec(cluster_batch, raise_on_error=True) or ())
            return [sum(itertools.islice(found, len(group))) for group in groups]
        batch = Batch(is_atomic=False)
        ask = batch.touch if self._touches else batch.exists
        for group in groups:
            ask(list(group))
        answer: Any = client.exec(batch, raise_on_error=True)
        return list(answer or ())
