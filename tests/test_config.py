"""A node's settings: file, flags and token; everything wrong is refused by name before a node starts."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from pathlib import Path

import pytest

from ucxkv.cli.node import node
from ucxkv.config import TOKEN_VARIABLE, load_config, node_config
from ucxkv.errors import SetupError
from ucxkv.node.config import NodeConfig


def _file(folder: Path, text: str) -> Path:
    path = folder / "node.toml"
    path.write_text(text)
    return path


def test_without_file_and_flags_the_defaults_stand(tmp_path: Path) -> None:
    """Goal: a laptop needs no configuration. Method: an empty file and no file give NodeConfig()."""
    assert node_config(environ={}) == NodeConfig()
    assert node_config(_file(tmp_path, ""), environ={}) == NodeConfig()


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    """Goal: the documented order. Method: one key set in both, one in the file only, one nowhere."""
    path = _file(tmp_path, '[node]\nname = "from-file"\nhost_bytes = "2GiB"\njoin = ["127.0.0.1:1", "[::1]:2"]\n')
    config = node_config(path, {"name": "from-flag", "listen": None}, environ={})
    assert config.name == "from-flag"
    assert config.host_bytes == 2 << 30
    assert config.join == ("127.0.0.1:1", "[::1]:2")
    assert config.listen == NodeConfig().listen


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[node]\nhost_byte = 1\n", "host_bytes"),
        ("[node]\nsomething_else = 1\n", "something_else"),
        ("[nodes]\nname = 'a'\n", "nodes"),
        ("name = 'a'\n", "name"),
        ("[node]\nhost_bytes = '1G'\n", "1G"),
        ("[node]\nhost_bytes = 100\n", "host_bytes"),
        ("[node]\nhost_bytes = true\n", "host_bytes"),
        ("[node]\nlisten = 'localhost'\n", "localhost"),
        ("[node]\nlisten = '2605:340::1:13337x'\n", "2605:340::1:13337x"),
        ("[node]\njoin = '127.0.0.1:1'\n", "join"),
        ("[node]\nhuge_pages = 'yes'\n", "auto | never | require"),
        ("[node]\npolicy = 'fifo'\n", "node.toml: policy; found: 'fifo'; needed: tuc | s3fifo | lru"),
        ("[node]\nreplicas = 2\n", "node.toml: replicas without cluster"),
        ("[node]\njoin = [1]\n", "node.toml: join; found: [1]"),
        ("[node]\nfree_low = 0.9\n", "free_low"),
        ("[node]\nconnections_max = 0\n", "connections_max"),
        ("[node]\nname = ''\n", "name"),
        ("[node]\ndata_port = 65536\n", "data_port"),
        ("[node]\ndata_port = '13400-13399'\n", "data_port"),
        ("[node]\ndata_port = '13400-'\n", "data_port"),
        ("[node]\ndata_port = -1\n", "data_port"),
        ("[node]\ndata_port = 'any'\n", "data_port"),
        ("[node]\ndata_port = '13330-13340'\n", "13337"),
        ("[node\n", "node.toml"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    """Goal: a misspelt key never silently means its default. Method: each bad file raises SetupError naming it."""
    with pytest.raises(SetupError) as caught:
        load_config(_file(tmp_path, text))
    assert named in str(caught.value)


def test_data_port_is_a_port_a_range_or_any(tmp_path: Path) -> None:
    """Goal: one setting for one port and for several. Method: file and flag."""
    assert node_config(environ={}).data_ports() is None
    assert node_config(_file(tmp_path, "[node]\ndata_port = 13400\n"), environ={}).data_ports() == (13400, 13400)
    assert node_config(None, {"data_port": "13400-13402"}, environ={}).data_ports() == (13400, 13402)
    assert node_config(None, {"data_port": "0"}, environ={}).data_ports() is None


def test_the_clients_table_may_stand_in_the_nodes_file(tmp_path: Path) -> None:
    """Goal: one file a host. Method: both tables; the node ignores the other one."""
    path = _file(tmp_path, "[node]\nname = 'n1'\n[client]\npath = 'rma'\n")
    assert node_config(path, environ={}).name == "n1"


def test_a_missing_file_is_a_setup_error(tmp_path: Path) -> None:
    """Goal: no traceback for an operator. Method: a path that does not exist."""
    with pytest.raises(SetupError, match="--config"):
        load_config(tmp_path / "absent.toml")


def test_the_token_comes_from_a_private_file_or_the_environment(tmp_path: Path) -> None:
    """Goal: no secret on a command line. Method: environment, file, file open to others, empty."""
    assert node_config(environ={TOKEN_VARIABLE: "from-environment"}).token == "from-environment"
    secret = tmp_path / "secret"
    secret.write_text("from-file\n")
    os.chmod(secret, 0o600)
    path = _file(tmp_path, '[node]\ntoken_file = "secret"\n')
    assert node_config(path, environ={TOKEN_VARIABLE: "other"}).token == "from-file"
    assert node_config(None, {"token_file": secret}, environ={}).token == "from-file"
    os.chmod(secret, 0o644)
    with pytest.raises(SetupError, match="chmod 600"):
        node_config(path, environ={})
    os.chmod(secret, 0o600)
    secret.write_text("\n")
    with pytest.raises(SetupError, match="empty"):
        node_config(path, environ={})


def test_every_key_is_documented_with_its_default() -> None:
    """Goal: docs/configuration.md is complete. Method: its table against NodeConfig's fields and the flags."""
    text = (Path(__file__).resolve().parent.parent / "docs" / "configuration.md").read_text()
    rows = {
        cells[1].strip(" `"): cells for cells in (line.split("|") for line in text.splitlines() if line[:3] == "| `")
    }
    fields = {field.name: field for field in dataclasses.fields(NodeConfig)}
    assert set(rows) == set(fields) | {"token_file"}
    flags = inspect.signature(node).parameters
    for name, cells in rows.items():
        assert cells[3].strip().startswith("yes") == (name in flags), name
        if name in fields and name not in ("name", "host_bytes", "disk_bytes"):
            default = fields[name].default
            said = {"[]": (), '""': "", "true": True}.get(cells[2].strip(" `"), cells[2].strip(" `"))
            assert str(said) == str(default), name


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"durability": "power"}, "a folder"),
        ({"durability": "process"}, "a folder"),
        ({"state_dir": "/s"}, r"durability = process \| power"),
        ({"durability": "always", "state_dir": "/s"}, "durability"),
    ],
)
def test_durability_that_cannot_be_kept_is_refused(flags: dict[str, object], said: str) -> None:
    """Goal: no class is promised that does not hold. Method: each wrong pair of settings, and a right one."""
    with pytest.raises(SetupError, match=said):
        node_config(None, flags)
    assert node_config(None, {"durability": "process", "state_dir": "/s"}).durability == "process"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"disk_codec": "zip"}, "disk_codec"),
        ({"disk_codec": "lossless"}, "disk_dtype"),
        ({"disk_codec": "lossless", "disk_dtype": "bf16"}, "bfloat16"),
        ({"disk_codec": "int8", "disk_channels": 128}, "disk_dtype"),
        ({"disk_codec": "int8", "disk_channels": 128, "disk_dtype": "float64"}, "float32 | float16 | bfloat16"),
        ({"disk_codec": "int8", "disk_dtype": "bfloat16"}, "disk_channels = 0"),
        ({"disk_codec": "int8", "disk_dtype": "bfloat16", "disk_channels": 128, "disk_tokens": 0}, "disk_tokens"),
        ({"disk_codec": "int8", "disk_dtype": "bfloat16", "disk_channels": 128, "disk": ()}, "no disk"),
    ],
)
def test_a_codec_that_cannot_work_is_refused_with_what_it_needs(settings: dict[str, object], said: str) -> None:
    """Goal: no node finds out later that it cannot encode. Method: each missing or wrong setting beside a codec."""
    with pytest.raises(SetupError) as caught:
        node_config(None, {"disk": ("/d",), **settings}, environ={})
    assert said in str(caught.value)


def test_a_codec_needs_its_library_when_the_node_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the fix is named. Method: right settings without zstandard and with it; int8 and none do without."""
    right = {"disk": ("/d",), "disk_dtype": "bfloat16", "disk_channels": 128}
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "zstandard", None)
        with pytest.raises(SetupError, match=r'--disk-codec.*pip install "ucxkv\[codec\]"'):
            node_config(None, {**right, "disk_codec": "lossless"}, environ={})
        assert node_config(None, {**right, "disk_codec": "int8"}, environ={}).disk_codec == "int8"
        assert node_config(None, right, environ={}).disk_codec == "none"
    pytest.importorskip("zstandard", reason="needs the extra codec")
    assert node_config(None, {**right, "disk_codec": "lossless"}, environ={}).disk_codec == "lossless"
