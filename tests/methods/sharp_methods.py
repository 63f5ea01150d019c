"""Methods as users would write them, in a module that other processes can import."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from unde.kernels import BoundKernel, FeatureLayout, Gram, Kernel, Needs, Round, chunks, read
from unde.methods import TRAK, Method
from unde.tasks import Classification


@dataclass(frozen=True)
class Whitened:
    """K = (C + λI)⁻¹ with C the mean of g gᵀ: mixes all columns, so that K g(n) is stored."""

    damping: float
    fisher: str = "empirical"

    def bind(self, sizes: FeatureLayout) -> BoundKernel:
        return OnSizes(self.damping, sizes)


@dataclass(frozen=True)
class OnSizes(BoundKernel):
    damping: float
    sizes: FeatureLayout
    key: str = "mean of outer products"

    @property
    def rounds(self):
        return [Round("outer", len(self.sizes.runs()), self.outer)]

    def outer(self, source, job, before):
        total = torch.zeros(self.sizes.width, self.sizes.width, dtype=torch.float64)
        for phi in chunks(source, self.sizes.runs()[job]):
            total += phi.double().T @ phi.double()
        return {"outer": total}

    def fit(self, moments, source):
        mean = moments["outer"] / self.sizes.examples
        return Made(torch.linalg.inv(mean + self.damping * torch.eye(len(mean), dtype=torch.float64)), source)

    def needs(self):
        return Needs(memory=8 * self.sizes.width**2)


@dataclass(frozen=True, eq=False)
class Made:
    inverse: torch.Tensor
    source: object

    def apply(self, rows):
        return (rows.double() @ self.inverse).to(rows.dtype)

    def train(self, blocks):
        return self.apply(read(self.source, blocks))


@dataclass(frozen=True)
class Sharp(Method):
    """Own kernel, own final, own measure."""

    name: ClassVar[str] = "sharp"
    measure: ClassVar[str] = "margin"
    damping: float = 0.5
    scale: float = 2.0

    @property
    def kernel(self) -> Kernel:
        return Whitened(self.damping)

    @property
    def linear(self) -> bool:
        return False

    def final(self, linear, sides, weights):
        return self.scale * linear.tanh()


@dataclass(frozen=True)
class Softer(TRAK):
    """A known method with another default; it does not even have a name of its own."""

    damping: float = 3.0


@dataclass(frozen=True)
class Unhashable(Method):
    @property
    def kernel(self):
        return [Gram(0.1)]


class Margins(Classification):
    """Also knows how far the right class is ahead."""

    def measure(self, model, batch, *, name="loss", ids=None):
        if name != "margin":
            return super().measure(model, batch, name=name, ids=ids)
        x, y = batch
        logits = model(x)
        right = logits.gather(1, y[:, None])[:, 0]
        return right - logits.scatter(1, y[:, None], -torch.inf).logsumexp(1)


def make():
    import toy
    from unde import Setup

    return Setup(toy.net(), Margins(), toy.data(22))
