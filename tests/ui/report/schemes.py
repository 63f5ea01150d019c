"""The colours of both schemes, as the style sheet declares them."""

import re

from unde.ui.report.page import CSS

LIGHT, DARK = re.findall(r":root \{([^}]*)\}", CSS)
