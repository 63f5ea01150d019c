"""Methods: named choices of measurement, projection, kernel K and final transform.

    score(q, n; w) = final( Σ_c η_c Σ_j w_j ⟨ g_j(q), [K g(n)]_j ⟩ )

TracIn has K = I (Eq. 1 of the paper), TRAK K = (ΦᵀΦ + λI)⁻¹ (Eq. 2), LoGRA its diagonal blocks layer by layer,
EKFAC the eigenvalue-corrected Kronecker approximation of the Fisher matrix, inverted.
"""

from unde.methods.base import CUSTOM, FinalContext, Method
from unde.methods.builtin import (
    AUTO,
    CHOICES,
    DAMPINGS,
    DEFAULT_DAMPING,
    DEFAULT_METHOD,
    EKFAC,
    PAPER_DAMPINGS,
    TRAK,
    Damped,
    Fisher,
    LoGRA,
    TracIn,
)
from unde.methods.diffusion import DAS, DTRAK, JourneyTRAK
from unde.methods.registry import (
    METHODS,
    NAMES,
    PROJECTION,
    UnimportedMethod,
    for_building,
    on_index,
    parse,
    with_projection,
)

__all__ = [
    "AUTO",
    "CHOICES",
    "CUSTOM",
    "DAMPINGS",
    "DAS",
    "DEFAULT_DAMPING",
    "DEFAULT_METHOD",
    "DTRAK",
    "EKFAC",
    "METHODS",
    "NAMES",
    "PAPER_DAMPINGS",
    "PROJECTION",
    "TRAK",
    "Damped",
    "FinalContext",
    "Fisher",
    "JourneyTRAK",
    "LoGRA",
    "Method",
    "TracIn",
    "UnimportedMethod",
    "for_building",
    "on_index",
    "parse",
    "with_projection",
]
