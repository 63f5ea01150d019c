"""A small project as a user would have one, and commands run on it in this process."""

import shlex

from typer.testing import CliRunner

from unde import cli

PROJECT = """
import torch
import unde

def make():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(90, 6, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    return unde.Setup(model, unde.tasks.Classification(), (x[:60], y[:60]),
                        learn_queries=(x[60:75], y[60:75]), eval_queries=(x[75:], y[75:]),
                        ids=[f"row-{i}" for i in range(60)])

def large():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(715, 6, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    setup = make()
    setup.train_data, setup.ids = (x[:700], y[:700]), None
    setup.learn_queries, setup.eval_queries = (x[700:708], y[700:708]), (x[708:], y[708:])
    return setup

def overlapping():
    setup = make()
    setup.learn_queries = setup.eval_queries
    return setup

def nothing():
    return 3

def marked():
    setup = make()
    setup.contributors = {"style": torch.ones(3, 60, dtype=bool)}
    return setup
"""

TRAINED = (
    PROJECT
    + """
def trained():
    setup = make()
    x, y = setup.train_data
    def train(indices, seed):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        rows = torch.as_tensor(indices)
        for _ in range(20):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        return model
    setup.train = train
    setup.model = train(range(len(x)), 0)
    return setup
"""
)


def run(*arguments, both=False, columns=100):
    """What a command prints; its line, or the beginning of it, may be one text. With `both`, stderr too."""
    first, *rest = map(str, arguments)
    result = CliRunner().invoke(cli.app, [*shlex.split(first), *rest], env={"COLUMNS": str(columns)})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output if both else result.stdout


def invoke(*arguments):
    """What is printed on both streams; notes go to stderr."""
    return run(*arguments, both=True)


def extend_project(name, text, target, *options):
    """More in the module, and an index of it in idx, without a projection; the target."""
    with open(f"{name}.py", "a") as file:
        file.write(text)
    run("build", f"{name}:{target}", "--out", "idx", "--projection", "none", *options)
    return f"{name}:{target}"


def add_project(folder, monkeypatch, text=PROJECT, name="project"):
    """A module in `folder`, which becomes the working folder; its name."""
    name = f"{name}_{folder.name.replace('-', '_')}"
    (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    return name
