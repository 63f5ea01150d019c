"""What the diffusion studies share: methods, indexes of the attributed denoisers, and scores of generated images."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import experiments.shared.cifar2 as cifar2
import experiments.shared.robots as robots
from experiments.shared.denoising import AVERAGED, scheduler
from experiments.shared.places import HERE
from unde import Index
from unde.methods import DAS, DTRAK, TRAK, JourneyTRAK, Method, TracIn
from unde.scoring import GroupScores
from unde.tasks import Diffusion

STUDIES: dict[str, ModuleType] = {"cifar2": cifar2, "robots": robots}
METHODS: dict[str, Method] = {
    "TracIn": TracIn(),
    "TRAK": TRAK(),
    "Journey-TRAK": JourneyTRAK(),
    "D-TRAK": DTRAK(),
    "DAS": DAS(),
}


class Attributed:
    """The model of a study and the indexes of its gradients, one for each measure, built in runs/ when asked for."""

    def __init__(self, study: str, there: ModuleType | None = None) -> None:
        self.study, self.there = study, there or STUDIES[study]
        self._indexes: dict[str, Index] = {}

    def index(self, method: Method) -> Index:
        if method.measure not in self._indexes:
            self._indexes[method.measure] = Index.build(
                self.there.attributed(),
                Diffusion(scheduler(), AVERAGED),
                self.there.columns(),
                self._folder(method) / "index",
                method=TRAK() if method.measure == "loss" else method,
                groups=self.there.GROUPS,
                store_dtype="float32",
                memory="2GB",
            )
        return self._indexes[method.measure]

    def scores(self, method: Method, role: str, columns: dict[str, Any] | None = None) -> GroupScores:
        """Of the generated queries of a role, or of others under its name; their features are kept in runs/."""
        journey = isinstance(method, JourneyTRAK)
        if columns is None:
            columns = self.there.queries(role).queries(journey)
        path = self._folder(method) / f"{role}{'-journey' * journey}.safetensors"
        index = self.index(method)
        return index.score(index.features(columns, path), method)

    def _folder(self, method: Method):
        return HERE / "runs" / f"{self.study}-{method.measure}"
