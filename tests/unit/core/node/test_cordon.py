"""The list of cordoned GPUs is changed by one GPU, and by no other."""

from hypothesis import given
from hypothesis import strategies as st

from agent.cluster import CORDON
from agent.model import GpuUuid
from agent.node.devices import ReportedGpu, cordon_edit, read_cordon
from tests.builders import G1, G2


def test_for_people_a_gpu_has_its_index_and_nothing_that_a_terminal_obeys():
    assert f"1 ({G2})" == ReportedGpu(G2, 1).words
    assert "\x1b" not in ReportedGpu(GpuUuid("GPU-\x1b[2J")).words


@given(st.lists(st.sampled_from(["a", "b", " c ", "", G1])), st.booleans())
def test_after_an_edit_the_gpu_is_as_wanted_and_all_others_as_before(words, cordon):
    before = {CORDON: ",".join(words)}
    edit = cordon_edit(ReportedGpu(G1, 0), before, cordon=cordon)
    written = {key: text for key, text in {**before, **edit.changes}.items() if text is not None}
    after = read_cordon(written.get(CORDON))

    assert cordon is (G1 in after)
    assert [one for one in read_cordon(before[CORDON]) if one != G1] == [
        one for one in after if one != G1
    ]
    assert {} == cordon_edit(ReportedGpu(G1, 0), written, cordon=cordon).changes
