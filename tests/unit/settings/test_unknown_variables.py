"""A variable with the agent's prefix that no setting reads: what may have been meant."""

import pytest

from agent.codec.faults import Faults
from agent.core.errors import SettingsError
from agent.settings.surroundings import read_surroundings


def read(environ: dict[str, str]) -> None:
    faults = Faults()
    read_surroundings(environ, {}, faults)
    faults.refuse()


def test_an_unknown_variable_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(SettingsError) as caught:
        read({"PATH": "/bin", "HAMI_AGENT_SHARING_SPLIT_CUONT": "4"})

    assert (
        "env HAMI_AGENT_SHARING_SPLIT_CUONT: unknown setting; "
        "did you mean HAMI_AGENT_SHARING_SPLIT_COUNT?"
    ) == str(caught.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("SPLIT_COUNT", "SHARING_SPLIT_COUNT"),
        ("SHARING_SPLITCOUNT", "SHARING_SPLIT_COUNT"),
        ("WEB_PROT", "WEB_PORT"),
        ("STATE_DIR", "PATHS_STATE"),
    ],
)
def test_a_variable_that_lacks_its_section_or_is_misspelt_is_known(name: str, meant: str) -> None:
    with pytest.raises(SettingsError, match=rf"; did you mean HAMI_AGENT_{meant}\?$"):
        read({f"HAMI_AGENT_{name}": "1"})


@pytest.mark.parametrize("name", ["CONFIG", "CONFIG_FILE", "CONFIG_PATH"])
def test_a_variable_for_the_settings_file_is_told_the_flag(name: str) -> None:
    with pytest.raises(SettingsError, match=r"only the flag --config names the settings file$"):
        read({f"HAMI_AGENT_{name}": "/etc/x.yaml"})


@pytest.mark.parametrize("name", ["XYZ", "TOKEN", "SERVICE", "DEBUG", ""])
def test_a_variable_that_is_near_to_none_is_told_how_they_are_made(name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read({f"HAMI_AGENT_{name}": "1"})

    assert str(caught.value) == (
        f"env HAMI_AGENT_{name}: unknown setting; a variable is HAMI_AGENT_ and the words of a "
        "key, such as HAMI_AGENT_SHARING_SPLIT_COUNT; `hami-agent config show` lists all keys"
    )
