"""How the files here were made, with kronfluence 1.0.1, dattri 0.3.0 and bergson 2.5.1, on the models of the tests.

    python tests/data/peers/make.py classifier    # kronfluence and dattri, on toy.net and toy.data
    python tests/data/peers/make.py texts         # model/, train.jsonl and ask.jsonl for bergson, which is a command:

    bergson build train   --model model --dataset train.jsonl --prompt_column text --precision fp32
    bergson build queries --model model --dataset ask.jsonl   --prompt_column text --precision fp32
    bergson score scores  --model model --dataset train.jsonl --prompt_column text --query_path queries
    bergson score tokens  --model model --dataset train.jsonl --prompt_column text --query_path queries \
        --attribute_tokens

each with --token_batch_size 64 --projection_dim 0. Of what these write, only scores, gradients and info.json are here.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent.parent / "integrations")]


def classifier() -> None:
    from dattri.algorithm.tracin import TracInAttributor
    from dattri.task import AttributionTask
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    import toy

    train, asked = TensorDataset(*toy.data(22)), TensorDataset(*toy.data(4, seed=1))

    class Summed(Task):
        def compute_train_loss(self, batch, model, sample=False):
            return cross_entropy(model(batch[0]), batch[1], reduction="sum")

        def compute_measurement(self, batch, model):
            return self.compute_train_loss(batch, model)

    analyzer = Analyzer(
        "kronfluence", prepare_model(toy.net(), Summed()), Summed(), cpu=True, output_dir=str(HERE)
    )
    plain = FactorArguments(strategy="identity")
    analyzer.fit_all_factors("identity", train, factor_args=plain, per_device_batch_size=8)
    for name, by_module in (("modules", True), ("whole", False)):
        asks = ScoreArguments(compute_per_module_scores=by_module)
        analyzer.compute_pairwise_scores(
            name, "identity", asked, train, 2, per_device_train_batch_size=8, score_args=asks
        )

    model = toy.net()

    def loss(params, example):
        x, y = example
        return cross_entropy(torch.func.functional_call(model, params, (x[None],)), y[None])

    task = AttributionTask(loss_func=loss, model=model, checkpoints=model.state_dict())
    tracin = TracInAttributor(task=task, weight_list=torch.ones(1), normalized_grad=False)
    tracin.projector_kwargs = None  # gradients themselves
    found = tracin.attribute(DataLoader(train, batch_size=8), DataLoader(asked, batch_size=4))
    np.save(HERE / "dattri.npy", found.detach().numpy())


def texts() -> None:
    from hf_toy import LINES, save, write_jsonl

    save(HERE / "model")
    write_jsonl(HERE / "train.jsonl", LINES[:6])
    write_jsonl(
        HERE / "ask.jsonl",
        ["The people of the west ask for roads.", "Peace with all nations, and honest trade."],
    )


if __name__ == "__main__":
    {"classifier": classifier, "texts": texts}[sys.argv[1]]()
