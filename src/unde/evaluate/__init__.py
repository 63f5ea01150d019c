"""Evaluation of attributions: metrics, baselines, and banks of retrained models."""

from unde.evaluate.bank import Bank, TrainingSpec
from unde.evaluate.bank.training import QueryUtility, TargetUtility
from unde.evaluate.baselines import baseline_scores, bm25, random_indices
from unde.evaluate.compare import Comparison, FineGrained, compare, fine_grained
from unde.evaluate.counterfactual import ChoiceComparison, Counterfactual, compare_choices, counterfactual
from unde.evaluate.estimate import Estimate, paired
from unde.evaluate.group_strength import (
    Heatmap,
    lds_strength,
    pattern_similarity,
    recall_strength,
    unet_cell,
)
from unde.evaluate.hidden_states import representation_distance, representation_similarity
from unde.evaluate.metrics import lds, mislabel_auc, mislabel_auc_interval, recall_at_k
from unde.evaluate.overlap import Overlap, find_overlaps, text_overlaps
from unde.evaluate.search import WeightSearch, search
from unde.evaluate.sources import SourceShares, source_shares
from unde.evaluate.tail_patch import TailPatch, tail_patch

Training = TrainingSpec  # its name before 0.3

__all__ = [
    "Bank",
    "ChoiceComparison",
    "Comparison",
    "Counterfactual",
    "Estimate",
    "FineGrained",
    "Heatmap",
    "Overlap",
    "QueryUtility",
    "SourceShares",
    "TailPatch",
    "TargetUtility",
    "TrainingSpec",
    "WeightSearch",
    "baseline_scores",
    "bm25",
    "compare",
    "compare_choices",
    "counterfactual",
    "find_overlaps",
    "fine_grained",
    "lds",
    "lds_strength",
    "mislabel_auc",
    "mislabel_auc_interval",
    "paired",
    "pattern_similarity",
    "random_indices",
    "recall_at_k",
    "recall_strength",
    "representation_distance",
    "representation_similarity",
    "search",
    "source_shares",
    "tail_patch",
    "text_overlaps",
    "unet_cell",
]
