"""What root in a container keeps in its directory is counted without capabilities."""

import os

from tests.host.hook_space import (
    HERE,
    IDENTITIES,
    NO_PRIVILEGES,
    OTHER,
    beside,
    each,
    renaming,
    said,
)

pytestmark = HERE


@IDENTITIES
def test_a_directory_that_was_closed_is_told_and_stays_as_it_is(hook, leaf, identity):
    closed = [(0, 0), (0o400, 0), (0o300, 0), (0o700, OTHER), (0o744, OTHER)]
    leaves = beside(leaf, 5)
    for one, (mode, owner) in zip(leaves, closed, strict=True):
        (one / "shut" / "in").mkdir(parents=True)
        for number in range(5):
            (one / "shut" / "in" / f"{number}").touch()
        os.chown(one / "shut", owner, owner)
        (one / "shut").chmod(mode)

    lines = said(hook, each(leaves, "measure()"), *identity)

    assert [True] * 5 == [line.endswith(" 1 True") for line in lines]
    found = [(one / "shut").stat() for one in leaves]
    assert closed == [(one.st_mode & 0o7777, one.st_uid) for one in found]


def test_in_one_that_may_be_listed_and_not_looked_into_counting_ends_too(hook, leaf):
    (leaf / "shut").mkdir()
    for number in range(10_100):
        (leaf / "shut" / f"{number}").touch()
    (leaf / "shut").chmod(0o400)

    assert ["10001 1 True"] == said(hook, "measure()\n", *NO_PRIVILEGES)


@IDENTITIES
def test_what_other_users_made_and_left_open_is_counted(hook, leaf, identity):
    (leaf / "d").mkdir()
    (leaf / "d" / "file").write_text("")
    for path in (leaf / "d", leaf / "d" / "file"):
        os.chown(path, OTHER, OTHER)
    (leaf / "d" / "file").chmod(0)

    assert ["2 0 False"] == said(hook, "measure()\n", *identity)


@IDENTITIES
def test_a_container_that_closes_its_own_directory_is_told(hook, leaf, identity):
    leaves = beside(leaf, 2)
    for mode, one in zip((0, 0o300), leaves, strict=True):
        one.chmod(mode)

    assert ["0 1 True"] * 2 == said(hook, each(leaves, "measure()"), *identity)
    assert [0, 0o300] == [one.stat().st_mode & 0o7777 for one in leaves]


def test_what_is_mounted_in_it_is_told_and_not_entered(hook, leaf):
    (leaf / "a").mkdir()
    mounting = f"sh('mount', '-t', 'tmpfs', 'none', {str(leaf / 'a')!r})\n"
    filling = f"[open(f'{leaf}/a/{{n}}', 'w').close() for n in range(100)]\n"

    assert ["1 1 True"] == said(hook, f"{mounting}{filling}measure()\n")


def test_a_directory_with_a_file_system_of_its_own_harms_nobody_and_is_not_told(hook, leaf):
    mounting = f"sh('mount', '-t', 'tmpfs', 'none', {str(leaf)!r})\n"
    filling = f"[open(f'{leaf}/{{n}}', 'w').close() for n in range(10_100)]\n"

    assert ["0 0 False"] == said(hook, f"{mounting}{filling}measure()\n")


def test_a_tenant_that_renames_meanwhile_leads_the_look_nowhere(hook, leaf):
    """However names change, no look ends in an error, or outside: /usr has more entries."""
    looks = "for _ in range(30):\n    measure()\n"
    links = (
        'os.symlink("/usr", f"m{number % 5}/link")',
        'os.rename(f"m{number % 5}/o", "o")',
        'os.symlink("/usr", f"m{number % 5}/o")',
    )
    with renaming(leaf, *links):
        lines = said(hook, looks, *NO_PRIVILEGES)

    assert 30 == len(lines)
    assert [] == [line for line in lines if not line.endswith(" 0 False")]
