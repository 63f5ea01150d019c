import torch
from weights_fakes import FakeScores, random_scores

from unde.weights.contributions import Contributions, Noise, group_deviation


def test_spread_is_the_deviation_over_all_pairs():
    values = random_scores(groups=4) + 1e3
    expected = values.double().flatten(0, 1).std(0, correction=0)
    for rows in (7, 60):
        blocks = [block for _, block in FakeScores(values, rows=rows).stream(slice(0, 12))]
        torch.testing.assert_close(group_deviation(blocks), expected, rtol=1e-9, atol=0)


def test_noise_has_the_deviation_asked_for_and_no_mean():
    noise = Noise(torch.tensor([1.0, 100.0]), seed=0)
    drawn = noise.add(torch.zeros(4, 5000, 2), range(4), slice(0, 5000))
    # 20,000 draws: the deviation is within 4 standard errors, 1/√(2·20000), of the truth.
    torch.testing.assert_close(drawn.flatten(0, 1).std(0), noise.deviation, rtol=0.02, atol=0)
    assert (drawn.flatten(0, 1).mean(0) / noise.deviation).abs().max() < 0.03
    assert torch.corrcoef(drawn[:, :, 0])[0, 1:].abs().max() < 0.06  # queries have noise of their own


def test_noise_of_a_pair_depends_on_the_seed_and_not_on_the_blocks():
    noise = Noise(torch.ones(3), seed=5)
    whole = noise.add(torch.zeros(4, 3000, 3), range(4), slice(0, 3000))
    for start, stop in ((0, 1), (1000, 1100), (1023, 2049), (2999, 3000)):
        part = noise.add(torch.zeros(2, stop - start, 3), [1, 2], slice(start, stop))
        assert torch.equal(part, whole[1:3, start:stop])
    first, second = (
        Noise(torch.ones(3), seed).add(torch.zeros(1, 50, 3), [0], slice(0, 50)) for seed in (0, 1)
    )
    assert not torch.equal(first, second)


def test_noise_is_scaled_by_group_and_the_same_streamed_or_kept():
    values = random_scores(queries=6, examples=2000)
    queries = torch.arange(6)
    kept = Contributions(FakeScores(values), noise=2.0, seed=3)
    tight = Contributions(FakeScores(values, memory=1, rows=700), noise=2.0, seed=3)
    added = kept.load(slice(0, 6)) - values
    sigma = values.flatten(0, 1).std(0)
    torch.testing.assert_close(added.flatten(0, 1).std(0), 2 * sigma, rtol=0.05, atol=0)
    streamed = [
        torch.cat([block for _, block in blocks], dim=1) for _, blocks in tight.sweep("test", queries, 0)
    ]
    torch.testing.assert_close(torch.cat(streamed), kept.load(slice(0, 6)), rtol=1e-5, atol=1e-6)
