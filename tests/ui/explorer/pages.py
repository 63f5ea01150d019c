"""Small projects of all kinds with an index, and the page on them: behind a client, or in a browser."""

import io
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from unde import Index, Setup, Weights
from unde.methods import TRAK
from unde.tasks import Classification
from unde.ui.explorer import Session
from unde.ui.explorer.app import application, open_socket
from unde.ui.explorer.jobs import BackgroundJob
from unde.ui.explorer.query_builder import Inquiry

TOKEN = "a-token-of-the-tests"
HOSTILE = [
    "<script>document.title = 'taken'</script> said the first",
    '"><img src=x onerror="document.title=\'taken\'"> said the second',
    "</span></li><b onmouseover=document.title='taken'>third</b> &lt;b&gt;",
    "'=cmd|calc'!A1 said the fourth of them, without quotes",
]


def images(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bright squares: the class is the corner in which they are."""
    generator = torch.Generator().manual_seed(seed)
    x = 0.3 * torch.rand(n, 1, 8, 8, generator=generator)
    y = torch.randint(4, (n,), generator=generator)
    for i, c in enumerate(y.tolist()):
        x[i, 0, 4 * (c // 2) : 4 * (c // 2) + 3, 4 * (c % 2) : 4 * (c % 2) + 3] += 0.6
    return x, y


def classifier() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 6), nn.Tanh(), nn.Linear(6, 4)
        )


def classification() -> Setup:
    queries = {"learn_queries": images(3, 1), "eval_queries": images(6, 2)}
    return Setup(
        classifier(), Classification(), images(40, 0), ids=[f"img-{i}" for i in range(40)], **queries
    )


def language() -> Setup:
    """Training texts, some of which would like to be markup."""
    from hf_toy import LINES, gpt2, tokenizer

    from unde.integrations.transformers import hf_setup

    return hf_setup(
        gpt2(), [*LINES, *HOSTILE], tokenizer=tokenizer(), eval_queries=["The people are free and strong."]
    )


def session(setup: Setup, folder: Path, method: object = None, **more: object) -> Session:
    options = {"method": method or TRAK(projection="kron(4)"), "progress": False, "memory": "50MB"}
    options |= {"ids": setup.ids, "collate": setup.collate}
    index = Index.build(setup.model, setup.task, setup.train_data, folder, **options)
    groups = index.groups.names
    learned = Weights(torch.linspace(0.2, 1.8, len(groups)), groups, provenance={"how": "made up"})
    return Session(index, setup, {"learned": learned}, **more)


class Client:
    """What the page would send, and what comes back."""

    def __init__(self, session: Session, address: str) -> None:
        import httpx

        self.session, self.address = session, address
        root = address.partition("/?")[0]
        self.web = httpx.Client(base_url=root, headers={"x-unde-token": TOKEN}, timeout=30, trust_env=False)

    def post(self, path: str, said: object) -> dict:
        return self.web.post(path, json=said).json()

    def get(self, path: str) -> dict:
        return self.web.get(path).json()

    def job(self, path: str, said: object) -> dict:
        """What came of something in the line; its error as {"error"}."""
        begun = self.post(path, said)
        if "job" not in begun:
            return begun
        for _ in range(400):
            now = self.get(f"/api/jobs/{begun['job']}")
            if now["state"] in ("done", "failed", "cancelled"):
                return now.get("result") or now
        raise AssertionError("a job that does not end")

    def ask(self, *plus: dict, minus: tuple = (), **how: object) -> dict:
        return self.job("/api/ask", {"plus": list(plus), "minus": list(minus), **how})

    def rank(self, answer: dict, **how: object) -> dict:
        return self.post("/api/rank", {"answer": answer["answer"], "count": 5, **how})


def quiet_job() -> BackgroundJob:
    return BackgroundJob(lambda job: None, False)


def ask(session: Session, *plus: dict, job: BackgroundJob | None = None) -> dict:
    """The answer of a session, without a server."""
    return session.ask(Inquiry.read({"plus": list(plus)}), job or quiet_job())


def values(row: dict) -> dict[int, float]:
    """{position: score} of both sides of a row."""
    return {one["at"]: one["value"] for one in [*row["high"], *row["low"]]}


def png(size: tuple[int, int] = (8, 8), mode: str = "L", value: object = None, format: str = "PNG") -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new(mode, size, 128 if value is None else value).save(out, format)
    return out.getvalue()


@contextmanager
def client(session: Session):
    with served(session) as address:
        made = Client(session, address)
        yield made
        made.web.close()


@contextmanager
def served(session: Session):
    """A real server in a thread; gives the address of the page."""
    import uvicorn

    listening = open_socket("127.0.0.1", 0)
    config = uvicorn.Config(application(session, TOKEN), log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/?token={TOKEN}"
    finally:
        server.should_exit = True
        thread.join(5)
        listening.close()


def encoded(array) -> bytes:
    """Pixels (H, W, 3) as a PNG file."""
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(array).save(out, "PNG")
    return out.getvalue()
