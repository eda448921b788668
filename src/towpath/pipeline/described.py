"""The stages of a live model as the planner knows them: of what was found out about the whole model, each has what its
blocks take. Nothing is measured anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import nn

from towpath.core.formats import Precision
from towpath.core.units import BucketSpec, UnitSpec
from towpath.engine.layout import BucketLayout, UnitLayout, lay_out
from towpath.pipeline.shapes import outputs_without_values
from towpath.pipeline.split import blocks_in, cut
from towpath.planner.model import LinearSeconds, MeasuredPasses, Model, ModelUnit, StagedModel


class DescribedStages:
    """The planner's models of the stages of a model that may be cut in several ways.

    `whole` is the planner's description of the unsplit model, whose units are those of `layouts`. `example` is an input
    of one micro-batch of any size.
    """

    def __init__(
        self,
        whole: Model,
        model: nn.Module,
        layouts: Sequence[UnitLayout],
        example: torch.Tensor,
        precision: Precision,
    ) -> None:
        self._whole, self._model, self._example, self._precision = whole, model, example, precision
        self._between = blocks_in(model, layouts)
        self._unit_of: dict[int, ModelUnit] = {}
        for unit, layout in zip(whole.units, layouts, strict=True):
            self._unit_of |= {id(place.parameter): unit for bucket in layout.buckets for place in bucket.places}

    def __call__(self, count: int) -> StagedModel:
        """Cut into so many."""
        stages = cut(self._model, self._between, count, self._example)
        tied = self._tied(stages)
        models = [self._stage(number, stage, count, tied) for number, stage in enumerate(stages)]
        return StagedModel(self._whole, tuple(models), self._width(stages), sum(tied.values()))

    def _tied(self, stages: Sequence[nn.Module]) -> Mapping[int, int]:
        """Elements of what the first stage and the last one share, by parameter."""
        if len(stages) == 1:
            return {}
        first, last = ({id(p): p.numel() for p in stage.parameters()} for stage in (stages[0], stages[-1]))
        return {one: numel for one, numel in first.items() if one in last}

    def _width(self, stages: Sequence[nn.Module]) -> int:
        """Elements of a token that a stage hands on."""
        first = stages[0] if len(stages) > 1 else cut(self._model, self._between, 2, self._example)[0]
        (handed_on,) = outputs_without_values(first, [self._example], self._precision)
        return handed_on.numel() // self._example.numel()

    def _stage(self, number: int, stage: nn.Module, count: int, tied: Mapping[int, int]) -> Model:
        root, *blocks = lay_out(stage, None, self._precision)
        units = [self._root(root, number, count, tied), *map(self._blocks, blocks)]
        return Model(f"{self._whole.name}, stage {number}", self._whole.length, tuple(units))

    def _root(self, layout: UnitLayout, number: int, count: int, tied: Mapping[int, int]) -> ModelUnit:
        """The arithmetic of the root is that of the model's end."""
        own = [_without(bucket, tied) for bucket in layout.buckets]
        spec = UnitSpec("", tuple(bucket for bucket in own if bucket.numels), kept=True)
        root = self._whole.units[0]
        if number == count - 1:
            return replace(root, spec=spec)
        return ModelUnit(spec, 0.0, 0.0, 0.0, measured=None if root.measured is None else _NO_TIME)

    def _blocks(self, layout: UnitLayout) -> ModelUnit:
        elements: dict[int, int] = {}  # by the unit of the whole model in which they lie
        units = {id(unit): unit for unit in self._whole.units}
        for bucket in layout.buckets:
            for place in bucket.places:
                home = id(self._unit_of[id(place.parameter)])
                elements[home] = elements.get(home, 0) + place.numel
        parts = [_some_blocks(units[home], numel / units[home].numel) for home, numel in elements.items()]
        return replace(reduce(ModelUnit.combined_with, parts), spec=layout.spec, modules=len(layout.modules))


_NO_TIME = MeasuredPasses(LinearSeconds(0.0, 0.0), LinearSeconds(0.0, 0.0))


def _some_blocks(unit: ModelUnit, share: float) -> ModelUnit:
    """What is there for a moment is of one block, however many there are."""
    return replace(unit.computing(share), passing=unit.passing, passing_fp32=unit.passing_fp32)


def _without(bucket: BucketLayout, tied: Mapping[int, int]) -> BucketSpec:
    places = [place for place in bucket.places if id(place.parameter) not in tied]
    numels, matrices = (place.numel for place in places), (place.matrix for place in places)
    return replace(bucket.spec, numels=tuple(numels), matrices=tuple(matrices))
