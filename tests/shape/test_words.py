"""One word per thing: names that we give are checked, names that we only read are not."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.shape import tree

# Refused anywhere in a name. The word to use instead is in GLOSSARY.md.
REFUSED = {
    "card": "gpu",
    "cards": "gpus",
    "common": "the thing itself",
    "helper": "the thing itself",
    "helpers": "the thing itself",
    "manager": "the thing itself",
    "misc": "the thing itself",
    "processor": "the thing itself",
    "replica": "slice",
    "replicas": "split_count",
    "resync": "reconcile",
    "util": "the thing itself",
    "utils": "the thing itself",
    "vgpu": "slice",
    "vgpus": "slices",
}
# Refused as the whole name: alone they do not say whether a GPU or a slice is meant.
REFUSED_ALONE = {
    "dev": "gpu",
    "device": "gpu or slice",
    "devices": "gpus or slices",
    "devs": "gpus",
    "devmem": "physical_mib",
}
# (module or folder, word): why the word of somebody else is ours there.
ALLOWED: dict[tuple[str, str], str] = {
    ("agent/core/cluster/annotations.py", "vgpu"): "HAMi's annotation keys",
    ("agent/cli/decode.py", "devices"): "the name of a form of HAMi's annotations",
    ("agent/host/hook/directories.py", "dev"): "the directory /dev",
    ("agent/host/nvml/library.py", "common"): "NVIDIA's functions",
    ("agent/host/nvml/library.py", "device"): "NVIDIA's functions",
    ("agent/sandbox/kubelet", "device"): "the kubelet model speaks the device plugin API",
    ("agent/sandbox/kubelet", "devices"): "the kubelet model speaks the device plugin API",
}

CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def words(name: str) -> set[str]:
    return {word.lower() for word in WORD.findall(name)}


def allowed(path: Path, word: str) -> bool:
    return any(
        path.is_relative_to(place) for place, permitted in ALLOWED if permitted == word.lower()
    )


def refusals(path: Path, names: Iterable[tuple[str, int]]) -> Iterator[str]:
    for name, line in names:
        found = words(name) & REFUSED.keys()
        if name.lower().strip("_") in REFUSED_ALONE:
            found.add(name.lower().strip("_"))
        for word in sorted(found):
            if not allowed(path, word):
                instead = (REFUSED | REFUSED_ALONE)[word]
                yield f"{path}:{line}: {name}: say {instead}, not {word}"


def test_names_use_the_words_of_the_glossary():
    for path in tree.modules("agent"):
        names = ((path.stem, 1), (path.parent.name, 1), *tree.defined(path))

        assert [] == list(refusals(path, names))


@pytest.mark.parametrize("name", ["vgpu_count", "NodeManager", "GPUCard", "read_util", "_device"])
def test_a_refused_word_is_found_in_any_spelling(name: str):
    assert list(refusals(Path("agent/core/x.py"), [(name, 7)]))


@pytest.mark.parametrize("name", ["device_plugin", "utilisation", "discard", "gpu", "replicate"])
def test_a_word_that_only_contains_a_refused_one_is_fine(name: str):
    assert [] == list(refusals(Path("agent/core/x.py"), [(name, 7)]))


@pytest.mark.parametrize(("place", "word"), ALLOWED, ids=str)
def test_an_exception_is_still_needed(place: str, word: str):
    paths = [path for path in tree.modules("agent") if path.is_relative_to(place)]
    names = {name for path in paths for name, _ in tree.defined(path)}
    names |= {path.stem for path in paths}
    used = {name.lower().strip("_") for name in names}.union(*map(words, names))

    assert word in used


def test_no_two_classes_of_the_repository_have_one_name():
    places: dict[str, list[str]] = {}
    for path in (*tree.modules("agent"), *tree.modules("tests")):
        for name in CLASS.findall(tree.text(path)):
            places.setdefault(name, []).append(str(path))

    assert {} == {name: paths for name, paths in places.items() if len(paths) > 1}
