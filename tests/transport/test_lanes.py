"""What UCX says that it opened: its text of several versions, and real contexts and endpoints."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests.harness import ROOT
from ucxkv.transport.endpoint import Endpoint
from ucxkv.transport.lanes import Lane, lanes_of, lanes_text, read_lanes
from ucxkv.transport.progress import Worker
from ucxkv.transport.ucx import Context, _of_use

# As UCX 1.22 prints a context, and an endpoint over two rails with its datagram lane for keepalive.
CONTEXT = """
#     component 1  :  tcp
#            md 0  :  component 0  self
#      resource 0  :  md 0  dev 0  flags -- self/memory
#      resource 1  :  md 1  dev 1  flags -- tcp/eth0
#      resource 2  :  md 2  dev 2  flags -- rc_mlx5/mlx5_0:1
"""
ENDPOINT = """
# UCP endpoint
#               peer: <no debug data>
#                 lane[0]:  5:rc_mlx5/mlx5_0:1.0 md[2]      -> md[2]/ib/sysdev[255] seg 8256 rma_bw#0 am am_bw#0
#                 lane[1]:  9:rc_mlx5/mlx5_1:1.0 md[3]      -> md[3]/ib/sysdev[255] seg 8256 rma_bw#1
#                 lane[2]:  6:ud_mlx5/mlx5_0:1.0 md[2]      -> md[2]/ib/sysdev[255] keepalive
"""


def test_the_text_is_read() -> None:
    """Goal: transports and devices, once each, in order. Method: a context and an endpoint; then no such text."""
    assert read_lanes(CONTEXT) == (Lane("self", "memory"), Lane("tcp", "eth0"), Lane("rc_mlx5", "mlx5_0:1"))
    lanes = read_lanes(ENDPOINT)
    assert [lane.device for lane in lanes] == ["mlx5_0:1", "mlx5_1:1", "mlx5_0:1"]
    assert [lane.has_rma for lane in lanes] == [True, True, False]
    assert lanes_text(lanes) == "rc_mlx5/mlx5_0:1, rc_mlx5/mlx5_1:1"
    assert read_lanes("UCX of the year 2040 prints JSON") == ()
    assert lanes_text(()) == ""


def test_a_context_opens_the_devices_that_it_is_told() -> None:
    """Goal: NET_DEVICES for our context alone. Method: the loopback, and the environment afterwards."""
    with Context(devices=("lo",), is_shared=False) as context:
        assert context.net_devices == ("lo",)
        assert context.settings["NET_DEVICES"] == "lo"
        assert "MAX_RMA_RAILS" not in context.settings
        assert not context.has_rdma
    assert "UCX_NET_DEVICES" not in os.environ


def test_rails_set_ucx_striping() -> None:
    """Goal: UCX stripes over as many rails as were chosen. Method: one and two rails, in addition to the loopback."""
    for rails in (1, 2):
        with Context(devices=("lo",), rails=rails, is_shared=False) as context:
            assert context.settings["MAX_RNDV_RAILS"] == str(rails)
            assert context.settings.get("MAX_RMA_RAILS", str(rails)) == str(rails)
            assert context.unknown_settings_count == 0


@pytest.mark.parametrize("transports", [None, "tcp,self"])
def test_a_device_that_ucx_cannot_open_leaves_the_choice_to_ucx(transports: str | None) -> None:
    """Goal: sysfs shows what a container may not use; it works all the same. Method: a card that is not there."""
    with Context(devices=("mlx5_99:1",), transports=transports, is_shared=False) as context:
        assert context.net_devices and "mlx5_99:1" not in context.net_devices
        assert "NET_DEVICES" not in context.settings


def test_settings_that_the_devices_have_no_use_for_are_left_out() -> None:
    """Goal: UCX warns of nothing. Method: RDMA ports alone, interfaces alone, both, and what cannot be known."""
    settings = {"TCP_TX_SEG_SIZE": "256k", "UD_ETH_DGID_CHECK": "n", "KEEPALIVE_INTERVAL": "1s"}
    for devices, left_out in (
        ("mlx5_0:1,mlx5_1:1", "TCP_TX_SEG_SIZE"),
        ("eth0,lo", "UD_ETH_DGID_CHECK"),
        ("mlx5_0:1,eth0", ""),
        ("all", ""),
        ("^eth1", ""),
    ):
        assert set(settings) - set(_of_use(settings, devices)) == ({left_out} if left_out else set())


def test_the_users_devices_win() -> None:
    """Goal: UCX_NET_DEVICES is the user's. Method: a fresh interpreter that has it, told another device."""
    code = (
        "from ucxkv.transport.ucx import Context\n"
        "with Context(devices=('eth77',), is_shared=False) as context:\n"
        "    assert context.net_devices == ('lo',), context.lanes\n"
        "    assert 'NET_DEVICES' not in context.settings\n"
    )
    env = {**os.environ, "UCX_NET_DEVICES": "lo"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "eth77" not in done.stdout + done.stderr  # UCX was not even asked


async def test_an_endpoint_names_its_lanes() -> None:
    """Goal: what moves the bytes, not what was wished. Method: an endpoint over the loopback."""
    with Context(devices=("lo",), is_shared=False) as context:
        one, other = Worker(context), Worker(context)
        endpoint = Endpoint.connect(one, other.address, is_peer_mode=True)
        await endpoint.flush(deadline_ns=time.monotonic_ns() + 10_000_000_000)
        assert lanes_of(endpoint) == (Lane("tcp", "lo"),)
        await endpoint.aclose(force=True)
        await one.aclose()
        await other.aclose()
