"""The form of transfers that NCCL takes, forced on gloo."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import pytest

from towpath import api
from towpath.core.routes import Form
from towpath.engine.streams import queue


@contextmanager
def in_form(form: Form, shared: bool = False) -> Generator[None]:
    """Models that are sharded inside execute transfers in this form. Every rank must do so alike.

    With `shared`, queues share process groups, as with NCCL. Then all of them must run on one thread.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in (api, queue):
            patch.setattr(module, "form_for", lambda backend: form)
        patch.setattr(queue, "shares_groups", lambda backend: shared)
        yield
