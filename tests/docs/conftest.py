"""Small models of other tests serve here too."""

import sys
from pathlib import Path

for folder in ("integrations", "diffusion"):
    sys.path.append(str(Path(__file__).parent.parent / folder))
