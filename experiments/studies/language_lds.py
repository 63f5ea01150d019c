"""LDS of TracIn, TRAK, LoGRA and EKFAC with and without learned weights (the paper's WikiText table).

    python experiments/language_bank.py sotu && python experiments/language_lds.py sotu       # and: wikitext

Three disjoint roles: 2,048 (3,072) sequences train the models, 256 learn the weights, 256 evaluate. All settings
are the package's defaults; nothing here is chosen on the evaluation sequences.
"""

from __future__ import annotations

import argparse

from experiments.shared.common import percent, save
from experiments.shared.corpora import CORPORA
from experiments.shared.language import METHODS, attributed
from experiments.shared.language_bank import bank
from unde import learn_weights
from unde.evaluate import compare, lds


def main(name: str) -> None:
    there, retrained = attributed(name), bank(name)
    learn = there.index.features({"input_ids": there.data.learn})
    evaluate = there.index.features({"input_ids": there.data.evaluate})
    masks, utility = retrained.masks, retrained.utility["eval"]
    results: dict[str, dict] = {}
    print("LDS in %, 95 % interval over queries (over queries and subsets)")
    print(f"{'':14}{'w/o w':>22}{'w':>22}{'difference':>22}")
    for title, method in METHODS.items():
        weights = learn_weights(there.index.score(learn, method))
        found = compare(there.index.score(evaluate, method), weights, masks, utility)
        results[title] = {"method": str(method), "weights": weights.values.tolist(), **found.as_dict()}
        three = (found.unweighted, found.weighted, found.difference)
        print(f"{title:14}" + "".join(f"{percent(e):>22}" for e in three), flush=True)
    queries = there.data.evaluate
    for title, scores in (("BM25", there.bm25(queries)), ("similarity", there.similarity(queries))):
        estimate = lds(scores, masks, utility)
        results[title] = estimate.as_dict()
        print(f"{title:14}{percent(estimate):>22}")
    save(f"language_lds_{name}", results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", choices=CORPORA)
    main(parser.parse_args().corpus)
