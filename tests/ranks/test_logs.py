"""What a rank logs says which rank it is."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tests.ranks.server import World
from towpath.logs import logger

Worlds = Callable[[int], World]


def test_messages_begin_with_the_rank_and_go_to_loggers_under_towpath(world: Worlds) -> None:
    assert world(2).run(_logged) == [("towpath.tests", "[rank 0] 7 of 8"), ("towpath.tests", "[rank 1] 7 of 8")]


def _logged() -> tuple[str, str]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("towpath").addHandler(handler)
    try:
        logger("tests").warning("%d of %d", 7, 8)
    finally:
        logging.getLogger("towpath").removeHandler(handler)
    return records[0].name, records[0].getMessage()
