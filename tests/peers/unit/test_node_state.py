"""The register annotation in both of its forms is read as the same GPUs."""

from agent.hami.register import RegisteredGpu, encode_register, encode_register_colon
from agent.model import GpuUuid
from tests.peers.lab.node_state import gpus_of, text_of

GPUS = tuple(
    RegisteredGpu(GpuUuid(f"GPU-{index}"), index, 10, 81559, 100, "H100", 1, "hami-core", (), True)
    for index in (1, 2)
)


def test_both_forms_say_the_same():
    assert gpus_of(encode_register(GPUS)) == gpus_of(encode_register_colon(GPUS[::-1]))


def test_what_is_read_is_written_again():
    for text in (encode_register_colon(GPUS), encode_register(GPUS)):
        is_colon = text.endswith(":")
        assert gpus_of(text) == gpus_of(text_of(gpus_of(text), colon=is_colon))
    assert encode_register_colon(GPUS) == text_of(gpus_of(encode_register_colon(GPUS)), colon=True)
