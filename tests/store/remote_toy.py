"""What is in a remote place, as `toy.content` says it of a folder."""

import fsspec

from unde.store.remote import Remote


def objects(home: Remote) -> dict[str, bytes]:
    """All objects below a place, by name."""
    fs, root = fsspec.core.url_to_fs(home.url)
    fs.invalidate_cache()
    names = fs.find(root)
    return {name.removeprefix(root).lstrip("/"): fs.cat_file(name) for name in names}


def content(home: Remote) -> dict[str, bytes]:
    """Those that are part of what an index is."""
    return {name: found for name, found in objects(home).items() if not name.endswith(("log.jsonl", ".lock"))}
