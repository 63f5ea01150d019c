"""Several sets of weights side by side, and the blocks of UNets."""

import numpy as np
import pytest

from refusals import refused
from report_dom import parse, words
from unde.groups import unet_stages
from unde.ui.report import Page, WeightsPanel
from unde.ui.report.svg import Bar, bar_plot
from unde.ui.report.weights import weights_section

LORA = "attentions.0.transformer_blocks.0.attn1.to_q.lora_A.default"
# In the order in which diffusers lists them.
UNET = [
    "conv_in", "time_embedding.linear_1",
    *(f"down_blocks.{d}.{LORA}" for d in range(3)), *(f"up_blocks.{u}.{LORA}" for u in range(3)),
    f"mid_block.{LORA}", "conv_out",
]  # fmt: skip
FLOW = [*UNET[:5], UNET[8], *UNET[5:8], UNET[9]]


def panel(name: str, seed: int, groups=UNET, sharp: float = 1.0, **options) -> WeightsPanel:
    values = np.exp(sharp * np.random.default_rng(seed).normal(size=len(groups)))
    return WeightsPanel(groups, values / values.mean(), name=name, **options)


def section(*panels: WeightsPanel):
    return parse(Page("t", weights=panels).html()).one("#weights")


@pytest.fixture
def sets():
    return [panel("overall", 0, sharp=0.1), panel("subject", 1, objective=[0.1, 0.3]), panel("<style>", 2)]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("{}", True),
        ("unet.{}.weight", True),
        ("base_model.model.{}.lora_B.default", True),
        ("017:{}.lora_A.default.weight", True),
        ("lora_unet_{}", True),
        ("splash{}", False),
    ],
)
@pytest.mark.parametrize("dot", [".", "_"])
def test_stages_are_found_whatever_stands_around(pattern, expected, dot):
    names = [
        "down_blocks.0.resnets.0.conv1",
        "mid_block.attentions.0.proj_in",
        "up_blocks.11.upsamplers.0.conv",
    ]
    groups = [pattern.format(name.replace(".", dot)) for name in names]
    assert unet_stages(groups) == (["Down", "Mid", "Up"] if expected else None)


def test_real_names_of_a_unet_are_understood():
    diffusers = pytest.importorskip("diffusers")
    unet = diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(4, 4), norm_num_groups=2, layers_per_block=1, attention_head_dim=2,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    names = [name for name, _ in unet.named_parameters()]
    found = unet_stages(names)
    assert found is not None
    want = {"down_blocks": "Down", "mid_block": "Mid", "up_blocks": "Up"}
    assert found == [want.get(name.split(".")[0], "Other") for name in names]
    assert set(found) == {"Down", "Mid", "Up", "Other"}


def test_other_models_keep_their_blocks():
    groups = [f"body.{b}.layer{i}" for b in range(2) for i in range(4)]
    assert unet_stages(groups) is None
    root = section(panel("a", 0, groups), panel("b", 1, groups))
    assert [words(entry) for entry in root.one("ul.blocks").all("li")] == ["body.0", "body.1"]
    assert "in model order" in words(root.one(".lead"))


def test_one_set_of_a_unet_runs_down_mid_up():
    root = parse(weights_section([panel("", 0)]))
    tips = [title.text for title in root.all(".bar-group title")]
    assert [tip.split(" ")[0].rstrip(":") for tip in tips] == FLOW
    assert tips[5].startswith(f"mid_block.{LORA} (Mid): ")
    values = dict(zip(UNET, panel("", 0).values))
    assert [float(tip.rpartition(": ")[2]) for tip in tips] == [float(f"{values[name]:.3g}") for name in FLOW]
    assert [words(entry).split()[0] for entry in root.all("ul.blocks li")] == ["Other", "Down", "Mid", "Up"]
    assert (root.one("svg").attributes["aria-label"] or "").endswith("10 groups in the order of the UNet")


def test_given_blocks_and_their_order_are_kept():
    root = parse(weights_section([panel("", 0, blocks=["x"] * 5 + ["y"] * 5)]))
    assert [t.text.split(" ")[0].rstrip(":") for t in root.all(".bar-group title")] == UNET


def test_each_set_has_its_plot(sets):
    root = section(*sets)
    articles = root.all("article.weight-set")
    assert [words(article.one("h3")) for article in articles] == ["overall", "subject", "<style>"]
    for article, each in zip(articles, sets):
        values = dict(zip(UNET, np.asarray(each.values)))
        heights = np.array([float(bar.attributes["height"] or 0) for bar in article.all("rect.mark-bar")])
        shares = np.array([values[name] for name in FLOW])
        np.testing.assert_allclose(heights / heights.max(), shares / shares.max(), atol=0.01)
        tones = [(bar.classes - {"mark-bar"}).pop() for bar in article.all("rect.mark-bar")]
        assert tones == ["tone-0"] * 2 + ["tone-1"] * 3 + ["tone-2"] + ["tone-3"] * 3 + ["tone-0"]
        largest = [words(name) for name in article.all("tbody th")]
        assert largest == sorted(FLOW, key=lambda name: -values[name])
        assert not article.all("text.bar-label")
    assert [words(e) for e in root.one("ul.blocks").all("li")] == ["Other", "Down", "Mid", "Up"]
    assert [len(article.all("polyline")) for article in articles] == [0, 1, 0]


def test_sets_have_one_scale_unless_one_would_be_squashed(sets):
    def unit(root):
        grounds = []
        for article in root.all("article.weight-set"):
            line, bar = article.one("line.reference"), article.all("rect.mark-bar")[0]
            ground = float(bar.attributes["y"] or 0) + float(bar.attributes["height"] or 0)
            grounds.append(round(ground - float(line.attributes["y1"] or 0), 1))
        return grounds

    peaks = [np.max(each.values) for each in sets]
    assert max(peaks) < 4 * min(peaks)
    root = section(*sets)
    assert len(set(unit(root))) == 1
    assert "All plots have one scale." in words(root.one(".lead"))
    steep = WeightsPanel(UNET, [10.0] + [0.0] * 9, name="steep")
    flat = WeightsPanel(UNET, np.ones(10), name="flat")
    root = section(steep, flat)
    assert len(set(unit(root))) == 2
    assert "Each plot has its own scale." in words(root.one(".lead"))


def test_tables_compare_the_sets(sets):
    means, everything = (
        t for t in section(*sets).all("table") if len(t.all("thead th")) == 4 and "overall" in t.text
    )
    assert [words(h) for h in means.all("thead th")] == ["block", "overall", "subject", "<style>"]
    down = [words(cell) for cell in means.all("tbody tr")[1].children]  # ty: ignore
    assert down == ["Down", *(f"{np.asarray(each.values)[2:5].mean():.2f}" for each in sets)]
    assert [words(row) for row in everything.all("tbody th")] == FLOW
    mid = [words(cell) for cell in everything.all("tbody tr")[5].children]  # ty: ignore
    assert mid[1:] == [f"{np.asarray(each.values)[8]:.3f}" for each in sets]


def test_a_list_of_one_is_one_set():
    assert words(section(panel("only", 0)).one("h2")) == "Learned weights, layer by layer"
    assert not parse(Page("t", weights=[]).html()).all("#weights")


@pytest.mark.parametrize(
    ("panels", "says"),
    [
        ([panel("a", 0), panel("a", 1)], "two sets of weights are called 'a'"),
        ([panel("a", 0), panel("", 1)], "set 1 of 2 sets of weights has no name"),
        (
            [panel("a", 0), panel("b", 1, UNET[:5])],
            "weights 'b' are of other groups than 'a': expected the same 10",
        ),
        ([panel("a", 0), panel("b", 1, UNET[::-1])], "of other groups than 'a'"),
    ],
)
def test_sets_that_cannot_stand_side_by_side_are_refused(panels, says):
    refused(says, Page, "t", weights=panels)


def test_ranks_do_not_run_into_each_other():
    values = np.ones(256)
    values[[100, 101, 102, 200]] = [5.0, 7.0, 6.0, 4.0]
    bars = [Bar(float(v), "x", above={7.0: "1", 6.0: "2", 5.0: "3", 4.0: "4"}.get(v, "")) for v in values]
    plot = parse(bar_plot(bars, title="w", compact=True))
    assert [label.text for label in plot.all("text.above")] == ["1", "4"]  # the highest of three neighbours
