"""The list of cordoned GPUs: read as HAMi does, and changed by one GPU."""

from hypothesis import given
from hypothesis import strategies as st

from agent.cluster import CORDON, HANDSHAKE
from agent.model import GpuUuid
from agent.node.devices import ReportedGpu, cordon_edit, find_gpu, known_gpus, read_cordon
from tests.builders import G1, G2

GPUS = (ReportedGpu(G1, 0), ReportedGpu(G2, 1))


def test_spaces_and_empty_parts_do_not_count():
    assert (G1, G2) == read_cordon(f" {G1},, {G2} ,{G1},")
    assert () == read_cordon("") == read_cordon(None)


def test_a_gpu_is_found_by_index_or_uuid_also_if_only_the_cordon_names_it():
    known = known_gpus(GPUS, f"GPU-gone,{G1}")

    assert [GPUS[1], GPUS[0], None] == [find_gpu(known, one) for one in ("1", G1.upper(), "2")]
    assert ReportedGpu(GpuUuid("GPU-gone")) == find_gpu(known, "GPU-gone")
    assert 3 == len(known)


def test_for_people_a_gpu_has_its_index_and_nothing_that_a_terminal_obeys():
    assert f"1 ({G2})" == GPUS[1].words
    assert "\x1b" not in ReportedGpu(GpuUuid("GPU-\x1b[2J")).words


def test_the_last_one_takes_the_annotation_with_it():
    edit = cordon_edit(GPUS[0], {CORDON: G1, HANDSHAKE: "Requesting"}, cordon=False)

    assert {CORDON: None, HANDSHAKE: None} == edit.changes


@given(st.lists(st.sampled_from(["a", "b", " c ", "", G1])), st.booleans())
def test_after_an_edit_the_gpu_is_as_wanted_and_all_others_as_before(words, cordon):
    before = {CORDON: ",".join(words)}
    edit = cordon_edit(GPUS[0], before, cordon=cordon)
    written = {key: text for key, text in {**before, **edit.changes}.items() if text is not None}
    after = read_cordon(written.get(CORDON))

    assert cordon is (G1 in after)
    assert [one for one in read_cordon(before[CORDON]) if one != G1] == [
        one for one in after if one != G1
    ]
    assert {} == cordon_edit(GPUS[0], written, cordon=cordon).changes
