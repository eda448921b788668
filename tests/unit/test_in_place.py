"""A sum that lives in its own memory while it travels in fewer bytes."""

from __future__ import annotations

import pytest
import torch

from towpath.engine.parameters.gradients import narrowed, widen


@pytest.mark.parametrize("elements", [1, 2, 3, 64, 1000, 4097])
@pytest.mark.parametrize(
    "wide, narrow",
    [(torch.float32, torch.bfloat16), (torch.float64, torch.float32), (torch.float64, torch.float16)],
    ids=str,
)
def test_what_is_narrowed_and_widened_is_rounded_once_and_stays_where_it_was(
    elements: int, wide: torch.dtype, narrow: torch.dtype
) -> None:
    values = torch.randn(elements, dtype=wide, generator=torch.Generator().manual_seed(elements))
    memory = values.clone()
    travelling = narrowed(memory, narrow)
    assert torch.equal(travelling, values.to(narrow))
    assert travelling.data_ptr() == memory.data_ptr()
    widen(travelling, memory)
    assert torch.equal(memory, values.to(narrow).to(wide))


@pytest.mark.parametrize("slices", [1, 2, 3, 8])
def test_any_slice_may_be_widened_alone(slices: int) -> None:
    values = torch.arange(24.0 * slices)
    for slot in range(slices):
        memory = values.clone()
        travelling = narrowed(memory, torch.bfloat16).view(slices, -1)[slot]
        mine = memory.view(slices, -1)[slot]
        widen(travelling, mine)
        assert torch.equal(mine, values.bfloat16().float().view(slices, -1)[slot])


def test_what_is_as_wide_already_stays_as_it_is() -> None:
    memory = torch.ones(5)
    assert narrowed(memory, torch.float32) is memory
