"""Methods: named choices of measurement, projection, kernel K and final transform.

    score(q, n; w) = final( Σ_c η_c Σ_j w_j ⟨ g_j(q), [K g(n)]_j ⟩ )

TracIn has K = I (Eq. 1 of the paper), TRAK K = (ΦᵀΦ + λI)⁻¹ (Eq. 2), LoGRA its diagonal blocks layer by layer,
EKFAC the eigenvalue-corrected Kronecker approximation of the Fisher matrix, inverted.
"""

from unde.methods.base import OWN, FinalContext, Method
from unde.methods.builtin import (
    DAMPINGS,
    DAS,
    DTRAK,
    EKFAC,
    LEAST,
    METHODS,
    TRAK,
    USUAL,
    Damped,
    Fisher,
    JourneyTRAK,
    LoGRA,
    TracIn,
)
from unde.methods.elsewhere import Elsewhere
from unde.methods.registry import NAMES, PROJECTION, for_building, on_index, parse

__all__ = [
    "DAMPINGS",
    "DAS",
    "DTRAK",
    "EKFAC",
    "LEAST",
    "METHODS",
    "NAMES",
    "OWN",
    "PROJECTION",
    "TRAK",
    "USUAL",
    "Damped",
    "Elsewhere",
    "FinalContext",
    "Fisher",
    "JourneyTRAK",
    "LoGRA",
    "Method",
    "TracIn",
    "for_building",
    "on_index",
    "parse",
]
