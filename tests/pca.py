"""All pca directions in one go."""

from types import SimpleNamespace

from unde.gradients.pca import CovariancePass


def fit(*what, **settings):
    """The matrices, and how their passes were cut."""
    with CovariancePass(*what, **settings) as gathering:
        total = sum(gathering.covariances(i) for i in range(len(gathering.passes)))
        made = gathering.directions(total)
    return SimpleNamespace(matrices=made, size=gathering.size, rows=gathering.rows)
