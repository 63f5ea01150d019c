"""Who is answered and who is not; and whatever is sent, the server goes on."""

import json
import socket
import sys
import threading

import pytest

import pages
from refusals import refused
from unde.cli.options import ModelOptions
from unde.cli.report import serve
from unde.ui.explorer import app as run
from unde.ui.explorer.jobs import Jobs
from unde.ui.explorer.security import HEADERS, LARGE, SMALL, Guard, Refused

ADDRESSES = [
    "/", "/api/session", "/api/line", "/api/queries", "/api/example?at=0", "/api/marks", "/api/export", "/api/jobs/x",
]  # fmt: skip
POSTS = [
    "/api/ask", "/api/influenced", "/api/shade", "/api/read", "/api/rank", "/api/examples", "/api/find", "/api/mark",
    "/api/picture", "/api/jobs/x/cancel",
]  # fmt: skip


@pytest.mark.parametrize("path", ADDRESSES + POSTS)
@pytest.mark.parametrize("token", ["", "wrong", pages.TOKEN[:-1], pages.TOKEN + "x", "ü"])
def test_nothing_is_told_without_the_token(pictures, path, token):
    method = "POST" if path in POSTS else "GET"
    found = pictures.web.request(method, path, headers={"x-unde-token": token.encode()})
    assert found.status_code == 403 and "token" in found.text
    assert "<html" not in found.text
    for name, value in HEADERS.items():
        assert found.headers[name] == value


def test_the_page_has_its_token_in_the_address(pictures):
    page = pictures.web.get("/", params={"token": pages.TOKEN}, headers={"x-unde-token": ""})
    assert page.status_code == 403  # a header that is there counts
    del pictures.web.headers["x-unde-token"]
    try:
        page = pictures.web.get("/", params={"token": pages.TOKEN})
        assert page.status_code == 200 and "app.js" in page.text
        assert pictures.web.get("/api/session", params={"token": pages.TOKEN}).status_code == 403
        assert pictures.web.get("/static/app.js").headers["content-type"].startswith("text/javascript")
        assert pictures.web.get("/static/..%2Fapp.py").status_code == 404
    finally:
        pictures.web.headers["x-unde-token"] = pages.TOKEN
    assert "set-cookie" not in page.headers
    assert "unsafe-eval" not in page.headers["content-security-policy"]
    assert "script-src 'self';" in page.headers["content-security-policy"]


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:80", "", "localhost.evil", "0.0.0.0:8765"]
)
def test_other_names_are_refused(pictures, host):
    found = pictures.web.get("/api/session", headers={"host": host})
    assert found.status_code in (400, 421)
    assert "examples" not in found.text


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1", "[::1]:8765", "LOCALHOST:1"])
def test_this_machine_goes_by_several_names(pictures, host):
    assert pictures.web.get("/api/session", headers={"host": host}).status_code == 200


def test_other_origins_are_refused(pictures):
    here = str(pictures.web.base_url).rstrip("/")
    good = {"origin": here, "sec-fetch-site": "same-origin"}
    assert pictures.web.get("/api/session", headers=good).status_code == 200
    for bad in ({"origin": "http://evil.example"}, {"origin": "null"}, {"origin": here.replace("http", "https")},
                {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}):  # fmt: skip
        assert pictures.web.get("/api/session", headers=bad).status_code == 403
        assert pictures.web.post("/api/ask", headers=bad, json={}).status_code == 403
    followed = pictures.web.get("/", headers={"sec-fetch-site": "cross-site"})  # a link, with the token
    assert followed.status_code == 200


def test_everywhere_goes_by_the_names_of_this_machine():
    guard = Guard(None, "t", "0.0.0.0")

    def asked(host, server="10.0.0.5"):
        scope = {"path": "/", "method": "GET", "query_string": b"token=t", "server": (server, 8765)}
        guard.check(scope, {"host": host})

    asked("10.0.0.5:8765")
    asked(f"{socket.gethostname()}:8765")
    for other in ("evil.example:8765", "10.0.0.6:8765", "0.0.0.0:8765"):
        with pytest.raises(Refused):
            asked(other)


def test_too_much_at_once(pictures):
    assert pictures.web.post("/api/ask", content=b"x" * (SMALL + 1)).status_code == 413
    found = pictures.web.post("/api/picture", content=b"x" * (LARGE + 1))
    assert found.status_code == 413 and "at most 16,384 kB" in found.json()["error"]

    def pieces():
        for _ in range(SMALL // 1000 + 2):
            yield b"x" * 1000

    assert pictures.web.post("/api/ask", content=pieces()).status_code == 413  # without a length
    assert pictures.web.get("/api/line").status_code == 200


BAD = {
    "/api/ask": [
        {}, {"plus": []}, {"plus": 3}, {"plus": [{"kind": "all"}]}, {"plus": [{"kind": "eval"}]},
        {"plus": [{"kind": "text", "text": "  "}]}, {"plus": [{"kind": "text", "text": 3}]},
        {"plus": [{"kind": "eval", "at": 0}], "damping": "x"}, {"plus": [{"kind": "eval", "at": 0, "label": "cat"}]},
        {"plus": [{"kind": "eval", "at": 0}] * 65}, {"plus": [{"kind": "picture"}]},
        {"plus": [{"kind": "prompt", "seed": -1}]},
    ],
    "/api/rank": [{}, {"answer": 3}, {"answer": "x"}],
    "/api/mark": [{"at": -1, "mark": "label"}, {"at": 10**9, "mark": "label"}, {"at": True, "mark": "label"},
        {"at": 0, "mark": ["label"]}, {"at": 0, "mark": "x" * 999}],
    "/api/examples": [{}, {"at": [0] * 500}, {"at": [0.5]}, {"at": [0], "where": "pool"}, {"at": [0], "where": "x"},
        {"at": [0], "where": ["eval"]}],
    "/api/find": [{}, {"name": ""}, {"name": "img-99"}, {"name": "9" * 99}],
    "/api/influenced": [{}, {"at": "3"}], "/api/read": [{}, {"what": "all"}],
}  # fmt: skip


@pytest.mark.parametrize("path", BAD)
def test_bad_requests_have_one_clear_line(pictures, path):
    for said in BAD[path]:
        found = pictures.web.post(path, json=said)
        assert 400 <= found.status_code < 500, said
        assert set(found.json()) <= {"error", "gone"} and 10 < len(found.json()["error"]) < 300
    for raw in (b"", b"{", b"[]", b"[" * 100_000, b"\xff", b"NaN"):
        assert pictures.web.post(path, content=raw).status_code == 400
    assert pictures.web.get(path).status_code == 405


def test_questions_that_fail_in_the_line(pictures):
    for question, words in (
        ({"kind": "eval", "at": 99}, "0 to 5"),
        ({"kind": "text", "text": "hello"}, "texts cannot be asked about"),
        ({"kind": "prompt", "text": "a cat"}, "nothing is generated"),
        ({"kind": "picture", "picture": "gone"}, "choose or drop the file again"),
    ):
        assert words in pictures.ask(question)["error"]
    assert "unknown method" in pictures.ask({"kind": "eval", "at": 0}, method="ekfac")["error"]
    assert pictures.ask({"kind": "eval", "at": 0})["answer"]


def test_ranking_refuses_what_is_no_weight(pictures):
    answer = pictures.ask({"kind": "eval", "at": 0})
    for values in ([1], [1, 2, -1], [1, 2, "3"], "x", [1, 2, float("inf")], [True, 1, 1]):
        sent = json.dumps({"answer": answer["answer"], "values": values})
        assert "expected 3 numbers" in pictures.web.post("/api/rank", content=sent).json()["error"]
    for how in ({"weights": "others"}, {"count": 0}, {"count": 51}, {"count": "5"}, {"filter": 3}):
        assert pictures.rank(answer, **how)["error"]


@pytest.mark.parametrize("content", [b"", b"GIF89a", b"\x89PNG\r\n\x1a\nbroken", b"<svg onload=x>", "cut"])
def test_files_that_are_no_pictures(pictures, content):
    content = pages.png((64, 64), "RGB", "red", "JPEG")[:400] if content == "cut" else content
    found = pictures.web.post("/api/picture", content=content)
    assert found.status_code == 400 and "PNG or JPEG" in found.json()["error"]


def test_a_small_file_with_very_many_pixels(pictures):
    import struct
    import zlib

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 1, 0, 0, 0, 0)

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    bomb = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    )
    found = pictures.web.post("/api/picture", content=bomb)
    assert found.status_code == 400 and "pixels" in found.json()["error"]


def test_one_at_a_time_in_a_line():
    jobs, go, order = Jobs(), threading.Event(), []
    first = jobs.submit(lambda job: go.wait(5))
    while first.state == "waiting":
        pass
    quiet = jobs.submit(lambda job: order.append("shades"), quiet=True)
    later = [jobs.submit(lambda job, i=i: order.append(i)) for i in range(3)]
    assert [jobs.position(job) for job in (*later, quiet)] == [1, 2, 3, 4] and len(jobs) == 4
    jobs.cancel(later[1])
    assert later[1].state == "cancelled" and jobs.position(later[2]) == 2
    broken = jobs.submit(lambda job: 1 / 0)
    gone = jobs.submit(lambda job: sys.exit("over"))
    stopped = jobs.submit(lambda job: [job.tell("on", i) for i in range(10**9)])
    go.set()
    for job in (first, later[0], later[2], broken, gone):
        job.wait(5)
    jobs.cancel(stopped)
    stopped.wait(5)
    quiet.wait(5)
    assert order == [0, 2, "shades"] and stopped.state == "cancelled"
    assert broken.state == "failed" and "ZeroDivisionError" in broken.error
    assert gone.state == "failed" and "SystemExit" in gone.error


def test_a_line_has_an_end():
    jobs, go = Jobs(), threading.Event()
    first = jobs.submit(lambda job: go.wait(5))
    while first.state == "waiting":
        pass
    for _ in range(32):
        jobs.submit(lambda job: None)
    refused("32 questions are waiting", jobs.submit, lambda job: None)
    go.set()


def test_a_port_in_use():
    with run.open_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        refused(rf"port {port} .*--port 0", run.open_socket, "127.0.0.1", port)
    for port in (-1, 70_000):
        refused("expected 0", run.open_socket, "127.0.0.1", port)
    refused("no address", run.open_socket, "no.such.host.invalid", 0)


def test_a_missing_extra_is_one_line(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    refused(r"needs uvicorn: pip install 'unde\[serve\]'", serve, "idx", ModelOptions())
