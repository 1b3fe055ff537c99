"""The Dockerfile keeps its promises before anything is built."""

import re
import tomllib

from tests.shape import tree

DOCKERFILE = tree.text("deploy/image/Dockerfile")
BUILD, RUNTIME = re.split(r"^FROM \$\{RUNTIME\}$", DOCKERFILE, flags=re.MULTILINE)


def instructions(stage: str) -> list[tuple[str, str]]:
    return re.findall(r"^([A-Z]+) ((?:.*\\\n)*.*)$", stage, re.MULTILINE)


def test_the_wheel_in_the_image_is_built_by_the_locked_backend():
    project = tomllib.loads(tree.text("pyproject.toml"))

    assert project["build-system"]["requires"] == project["dependency-groups"]["wheel"]


def test_nothing_comes_from_outside_and_what_changes_often_comes_last_and_does_not_run_as_root():
    """Nor is anything run in the last stage: its base needs no shell."""
    words = [word for word, _ in instructions(RUNTIME)]
    told = {word: [text for one, text in instructions(RUNTIME) if one == word] for word in words}

    assert "ADD" not in {word for word, _ in instructions(DOCKERFILE)}
    assert "PIP_NO_INDEX=1" in BUILD
    assert {"--require-hashes -r backend.txt", "--require-hashes -r requirements.txt"} == set(
        re.findall(r"--require-hashes -r \S+", BUILD)
    )
    assert "RUN" not in words
    assert ["65532:65532"] == told["USER"]
    assert ["/needed", "/staged"] == [text.split()[1] for text in told["COPY"]]
    assert ["ARG", "ARG", "LABEL"] == words[-3:]


def test_the_command_starts_the_interpreter_as_on_bare_metal():
    ours, theirs = (
        re.findall(r"sed -i '(1s\|[^']+)'", text)
        for text in (DOCKERFILE, tree.text("systemd/install"))
    )

    assert ["1s|^#!.*python.*|& -IXfaulthandler|"] == ours == theirs


def test_the_wheels_are_for_the_python_of_the_base():
    (version,) = re.findall(r"^ARG BASE=python:(\d+\.\d+)-", DOCKERFILE, re.MULTILINE)

    assert f"--python-version {version} " in tree.text("deploy/image/context")
    assert f"/python{version} " in tree.text("deploy/image/base")
