"""The form of transfers that NCCL takes, forced on gloo, and the copies of a device with memory of its own."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import pytest

from towpath import api
from towpath.core.routes import Form
from towpath.engine import comm
from towpath.engine.parameters import bucket


@contextmanager
def in_form(form: Form, shared: bool = False) -> Generator[None]:
    """Models that are sharded inside execute transfers in this form. Every rank must do so alike.

    With `shared`, queues share process groups, as with NCCL. Then all of them must run on one thread.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in (api, comm):
            patch.setattr(module, "form_for", lambda backend: form)
        patch.setattr(comm, "shares_groups", lambda backend: shared)
        if form is Form.COLLECTIVES:
            patch.setattr(bucket, "has_own_memory", lambda device: True)
        yield
