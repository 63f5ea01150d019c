"""Other libraries, each in an environment and a process of its own, on the same models, data, rank and batches.

A peer is a file here with `NOTE`, what it computes and keeps, and `run(given)`, which does it once for the first
`given.examples` examples and tells its seconds: {"seconds": the pass over them, "planning": what goes before}, and
`numbers`, how many of each example are kept. What it cannot do it raises; the first line is put on the page.
"""

PEERS = {
    "bergson": "bergson==2.5.1",
    "dattri": "dattri==0.3.0",
    "kronfluence": "kronfluence==1.0.1",
    "traker": "traker==0.3.2",
    "captum": "captum==0.9.0",
}
