"""What the kubelet makes of an empty checkpoint. Of others: tests/peers/test_kubelet_restart.py."""

from agent.sandbox.kubelet import checkpoint
from tests.fakes.kubelet_rig import a_pod_object, a_rig_with_plugin


async def test_a_file_without_a_byte_is_an_empty_state(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        await rig.admit(a_pod_object())
        await rig.kubelet.stop()
        (rig.plugins / checkpoint.FILE_NAME).write_bytes(b"")

        await rig.kubelet.start()

        assert {} == rig.ids()
        assert 1 == len(rig.seen("checkpoint_lost"))
        await rig.come_back(plugin)
