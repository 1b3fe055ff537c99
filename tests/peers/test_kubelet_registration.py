"""How a plugin becomes known and is forgotten: the model and the real kubelet alike (legacy mode).

Only the model is tried on registration by socket path, which is kubelet 1.37 and later.
"""

import asyncio

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.wire.v1beta1 import DevicePluginOptions
from tests.peers.lab.nodes import ProbePlugin, first
from tests.peers.lab.table import FAR

LONG_NAME = "n" * 64
LONG_DOMAIN = ".".join(["d" * 61] * 4)


def a_plugin(node, name="p.sock", count=2):
    return ProbePlugin(node.plugins, resource=node.resource, name=name, count=count)


async def refused(plugin, **fields) -> tuple[Status, str | None]:
    with pytest.raises(GRPCError) as caught:
        await plugin.register(**fields)
    return caught.value.status, caught.value.message


async def test_another_version_is_refused_with_the_exact_text(node):
    async with a_plugin(node) as plugin:
        text = (
            'requested API version "v1" is not supported by kubelet. '
            'Supported version is ["v1beta1"]'
        )
        assert (Status.UNKNOWN, text) == await refused(plugin, version="v1")
        assert 0 == plugin.connections


async def test_names_that_no_plugin_may_register_are_refused_with_the_exact_text(node):
    async with a_plugin(node) as plugin:
        for name in (
            *("gpu", "x.kubernetes.io/g", "requests.a.b/c", "A/b", "a/b/c", "a/", "/a", "a/-b"),
            *(f"a/{LONG_NAME}", f"{LONG_DOMAIN}/g", "a_b/c", ""),
        ):
            text = f'the ResourceName "{name}" is invalid'
            assert (Status.UNKNOWN, text) == await refused(plugin, resource_name=name)


async def test_unusual_names_are_taken(node):
    async with a_plugin(node) as plugin:
        for name in ("vendor.com/gpu-1_x.Y", f"a/{LONG_NAME[1:]}", f"{LONG_DOMAIN[:244]}/g"):
            await plugin.register(resource_name=name)
            await node.until_listed(2, name)


@pytest.mark.parametrize(
    ("name", "endpoint"),
    [("sub/p.sock", "sub/p.sock"), ("p.sock", "/p.sock"), ("p.sock", "x/../p.sock")],
)
async def test_the_endpoint_is_joined_below_the_directory(node, name, endpoint):
    (node.plugins / name).parent.mkdir(exist_ok=True)
    async with a_plugin(node, name) as plugin:
        await plugin.register(endpoint=endpoint)
        await node.until_listed(2)


@pytest.mark.parametrize("place", ["real"], indirect=True)
async def test_the_dial_is_tried_again_after_about_a_second(node):
    loop = asyncio.get_running_loop()
    plugin = a_plugin(node)
    begun = loop.time()
    async with asyncio.TaskGroup() as group:
        group.create_task(plugin.register())
        await asyncio.sleep(0.3)  # it is the delay of the plugin under test
        await plugin.serve()
    took = loop.time() - begun
    await node.until_listed(2)
    await plugin.die()
    assert 0.9 <= took < FAR  # times one second


@pytest.mark.long
async def test_a_plugin_that_never_listens_fails_after_ten_seconds(node):
    begun = asyncio.get_running_loop().time()

    answer = await refused(a_plugin(node))

    text = "failed to dial device plugin: context deadline exceeded"
    assert (Status.UNKNOWN, text) == answer
    assert 9.9 <= asyncio.get_running_loop().time() - begun < 20


async def test_options_are_asked_before_the_reply_and_their_failure_fails_register(node):
    async with a_plugin(node) as plugin:
        plugin.script.options_error = GRPCError(Status.INTERNAL, "not now")

        text = "failed to get device plugin options: rpc error: code = Internal desc = not now"
        assert (Status.UNKNOWN, text) == await refused(plugin)
        assert 0 == plugin.streams


async def test_options_come_from_the_call_and_not_from_the_register_request(node):
    async with a_plugin(node) as plugin:
        plugin.script.prefer = first
        both = DevicePluginOptions(True, True)
        await plugin.register(options=both)
        await node.until_listed(2)
        await node.runs("p")
        assert ["allocate"] == [call.kind for call in plugin.calls]


async def test_all_calls_come_over_the_connection_that_register_opened(node):
    async with node.plugin() as plugin:
        await node.runs("p")

        assert 1 == plugin.connections
        paths = [headers[":path"].rpartition("/")[2] for headers in plugin.headers]
        assert ["GetDevicePluginOptions", "ListAndWatch", "Allocate"] == paths


async def test_calls_say_localhost_as_authority_and_have_no_deadline(node):
    async with node.plugin() as plugin:
        await node.runs("p")

        for headers in plugin.headers:
            assert "localhost" == headers[":authority"]
            assert "application/grpc" == headers["content-type"]
            assert "grpc-timeout" not in headers


async def test_a_second_register_replaces_the_endpoint_and_leaves_the_old_stream_open(node):
    async with node.plugin() as old, a_plugin(node, "q.sock") as new:
        await new.register()
        await node.until_listed(2)
        await node.runs("p")

        assert (1, 1) == (old.streams, new.streams)
        assert (0, 1) == (len(old.asked), len(new.asked))
        old.publish(old.devices[:3])
        await node.until_listed(3)


async def test_the_end_of_the_old_stream_disconnects_the_new_client(node):
    async with node.plugin() as old, a_plugin(node, "q.sock") as new:
        await new.register()
        await node.until_listed(2)

        old.end_streams()

        await node.until_listed(0)
        await node.until(lambda: new.streams == 0, "the new stream lives on")
        await node.until_counted(2, 0)
        assert 1 == new.connections, "nobody dials again"


async def test_after_a_failed_register_again_the_end_of_the_stream_goes_unnoticed(node):
    async with node.plugin() as plugin:
        plugin.script.options_error = GRPCError(Status.INTERNAL, "not now")
        await refused(plugin)

        plugin.end_streams()
        await node.until(lambda: plugin.streams == 0, "the stream lives on")
        await node.until_counted(4, 4)
        await node.until_listed(4)

        await node.runs("p")
        assert 1 == len(plugin.asked), "its connection is still open"


async def test_the_end_of_the_stream_makes_everything_unhealthy_and_nobody_dials_again(node):
    async with node.plugin() as plugin:
        await node.until_counted(4, 4)

        plugin.end_streams()

        await node.until_counted(4, 0)
        assert [] == await node.allocatable()
        assert (1, 0) == (plugin.connections, plugin.streams)
        await plugin.register()
        await node.until_counted(4, 4)
