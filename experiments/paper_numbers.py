"""Every number of the paper's tables, and the few that its text gives for figures; all in %, if not said otherwise.

A pair is a mean and the half width of its 95 % interval. Names are those of the paper but for methods, which have one
spelling here.
"""

from __future__ import annotations

Interval = tuple[float, float]
WithAndWithout = dict[str, tuple[Interval, Interval]]  # method → without weights, with weights

# Table 1: LDS, image classification on ImageNet
LDS_CLASSIFICATION: dict[str, WithAndWithout] = {
    "ResNet-18": {
        "TracIn": ((11.39, 1.06), (23.92, 1.26)),
        "TRAK": ((16.86, 1.03), (23.30, 1.18)),
    },
    "ViT-B/16": {
        "TracIn": ((9.67, 0.94), (17.63, 1.08)),
        "TRAK": ((14.77, 0.97), (16.74, 1.03)),
    },
}

# Table 2: LDS, GPT-2-small on WikiText-103
LDS_LANGUAGE: WithAndWithout = {
    "TracIn": ((6.31, 0.88), (9.23, 0.96)),
    "TRAK": ((12.69, 1.00), (14.63, 1.04)),
    "LoGRA": ((11.42, 1.00), (12.86, 1.04)),
    "EKFAC": ((15.14, 1.04), (18.33, 1.13)),
}

# Table 3: AUC of finding wrong labels on ImageNet, without and with weights
MISLABEL_AUC: dict[str, dict[str, tuple[float, float]]] = {
    "ResNet-18": {"TracIn": (54.40, 61.46), "TRAK": (59.66, 67.72)},
    "ViT-B/16": {"TracIn": (71.27, 83.58), "TRAK": (80.08, 83.48)},
}

# Tables 4 and 13: tail-patch; without weights, with weights, difference
TailPatch = dict[str, tuple[float, float | None, Interval | None]]
TAIL_PATCH_WIKITEXT: TailPatch = {
    "random": (0.39, None, None),
    "TracIn": (4.66, 5.60, (0.94, 0.17)),
    "TRAK": (7.77, 7.88, (0.10, 0.05)),
    "LoGRA": (6.34, 6.54, (0.20, 0.09)),
    "EKFAC": (5.54, 6.09, (0.55, 0.11)),
}
TAIL_PATCH_LLAMA: TailPatch = {
    "random": (-0.07, None, None),
    "TracIn": (0.04, 0.65, (0.61, 0.11)),
    "LoGRA": (1.78, 1.92, (0.15, 0.05)),
}

# Table 5: LDS, diffusion models
LDS_DIFFUSION: dict[str, WithAndWithout] = {
    "ArtBench-2": {
        "TracIn": ((17.63, 0.96), (22.02, 1.05)),
        "TRAK": ((18.39, 0.96), (22.15, 0.99)),
        "Journey-TRAK": ((11.56, 0.89), (16.00, 1.00)),
        "D-TRAK": ((22.72, 1.02), (25.15, 1.09)),
        "DAS": ((30.47, 1.15), (31.58, 1.15)),
    },
    "Naruto": {
        "TracIn": ((10.54, 0.82), (13.59, 0.81)),
        "TRAK": ((14.61, 0.80), (17.02, 0.83)),
        "Journey-TRAK": ((13.41, 0.80), (14.56, 0.82)),
        "D-TRAK": ((16.75, 0.85), (17.85, 0.85)),
        "DAS": ((18.72, 0.92), (20.44, 0.92)),
    },
    "SB-Pokemon": {
        "TracIn": ((9.34, 0.93), (11.79, 0.91)),
        "TRAK": ((10.68, 0.92), (12.24, 0.89)),
        "Journey-TRAK": ((7.97, 0.93), (9.24, 0.94)),
        "D-TRAK": ((33.88, 0.91), (35.05, 0.92)),
        "DAS": ((33.55, 1.04), (36.12, 0.99)),
    },
    "CIFAR-2": {
        "TracIn": ((1.39, 0.78), (8.48, 0.79)),
        "TRAK": ((8.51, 0.78), (10.59, 0.78)),
        "Journey-TRAK": ((6.03, 0.79), (8.39, 0.79)),
        "D-TRAK": ((10.17, 0.78), (12.18, 0.77)),
        "DAS": ((12.66, 0.80), (13.79, 0.81)),
    },
}

# Table 6: Recall@10 on SB-Pokemon with D-TRAK; subject, style, background, all three
RECALL: dict[str, dict[str, tuple[float, float, float, float]]] = {
    "train": {
        "none": (22.1, 64.9, 9.1, 96.0),
        "rep. dist.": (22.0, 10.5, 5.7, 38.2),
        "subject": (51.6, 35.5, 10.9, 98.0),
        "style": (17.0, 82.1, 0.6, 99.8),
        "background": (30.0, 48.5, 12.9, 91.4),
    },
    "validation": {
        "none": (19.4, 61.8, 17.5, 98.7),
        "rep. dist.": (13.4, 13.4, 16.3, 43.1),
        "subject": (50.6, 30.6, 18.4, 99.6),
        "style": (15.2, 73.0, 10.9, 99.0),
        "background": (29.8, 41.4, 26.6, 97.7),
    },
}

# Table 9: LDS with other k, the number of examples taken for true; "none" without weights
K = ("none", "1", "5", "10", "20", "50", "100")
SENSITIVITY_TO_K: dict[tuple[str, str], tuple[float, ...]] = {
    ("ArtBench-2", "TracIn"): (17.63, 21.07, 22.01, 22.02, 21.97, 21.91, 21.92),
    ("ArtBench-2", "TRAK"): (18.39, 21.75, 21.92, 22.15, 22.07, 21.97, 21.89),
    ("SB-Pokemon", "TracIn"): (9.34, 11.63, 11.79, 11.73, 7.46, 8.78, 6.23),
    ("SB-Pokemon", "TRAK"): (10.68, 11.83, 12.24, 11.97, 11.00, 8.98, 9.00),
}

# Table 10: LDS on ArtBench-2 with weights learned by other losses; "none" without weights
LOSSES = ("none", "top-k", "supervised", "bottom-k", "top-k-bottom-k", "no-norm")
LOSS_ABLATION: dict[str, tuple[Interval, ...]] = {
    "TracIn": ((17.63, 0.96), (22.02, 1.05), (22.31, 0.99), (21.28, 1.06), (21.66, 1.06), (6.89, 0.81)),
    "TRAK": ((18.39, 0.96), (22.15, 0.99), (21.83, 0.99), (20.95, 1.00), (21.83, 1.00), (9.80, 0.85)),
    "Journey-TRAK": ((11.56, 0.89), (16.00, 1.00), (13.87, 0.94), (13.96, 0.96), (15.50, 1.05), (1.62, 0.80)),
    "D-TRAK": ((22.72, 1.02), (25.15, 1.09), (24.50, 1.06), (20.37, 0.94), (24.00, 1.05), (14.69, 0.85)),
    "DAS": ((30.47, 1.15), (31.58, 1.15), (30.90, 1.15), (31.03, 1.16), (31.58, 1.14), (7.72, 1.41)),
}

# Table 11: LDS without weights, with weights of the data set, with weights of the other data set
TRANSFER_DATA_SETS: dict[str, dict[str, tuple[float, float, float]]] = {
    "ArtBench-2": {
        "TracIn": (17.63, 22.02, 20.19),
        "TRAK": (18.39, 22.15, 19.35),
        "Journey-TRAK": (11.56, 16.00, 12.55),
        "D-TRAK": (22.72, 25.15, 23.61),
        "DAS": (30.47, 31.58, 30.74),
    },
    "Naruto": {
        "TracIn": (10.54, 13.59, 13.48),
        "TRAK": (14.61, 17.02, 17.19),
        "Journey-TRAK": (13.41, 14.56, 14.36),
        "D-TRAK": (16.75, 17.85, 18.36),
        "DAS": (18.72, 20.44, 20.45),
    },
}

# Table 12: LDS on ArtBench-2 with weights learned for another method (along the rows); its own on the diagonal
METHODS = ("TracIn", "TRAK", "Journey-TRAK", "D-TRAK", "DAS")
TRANSFER_METHODS: dict[str, tuple[float, ...]] = {  # method → none, then weights of METHODS
    "TracIn": (17.63, 22.02, 21.02, 20.28, 19.96, 19.97),
    "TRAK": (18.39, 21.80, 22.15, 20.63, 19.68, 20.82),
    "Journey-TRAK": (11.56, 15.64, 15.58, 16.00, 12.16, 14.05),
    "D-TRAK": (22.72, 23.60, 23.45, 22.07, 25.15, 23.91),
    "DAS": (30.47, 30.14, 30.71, 28.69, 29.68, 31.58),
}

# Figure 1, from the text: mean LDS of single groups of up_blocks.1 and up_blocks.2 of Stable Diffusion, D-TRAK
STRENGTH_OF_UP_BLOCKS = 5.58
# Figure 6, from the text: mean cosine similarity of two settings
SIMILARITY = {"LDS of single groups": 0.689, "learned weights": 0.845}
