"""What `ucxkv perf` decides and draws, without running anything: plans, parsing, wires, tables, plots, verification."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ucxkv.errors import SetupError, UsageError
from ucxkv.perf import wires
from ucxkv.perf.backends import BACKENDS, find_perftest, parse_interpreters
from ucxkv.perf.link import DEFAULT_PORT, parse_host
from ucxkv.perf.machine import machine_facts, parse_devices
from ucxkv.perf.peers.base import Config, Result, Task, WrongBytes
from ucxkv.perf.peers.blocks import Pattern, anonymous_blocks
from ucxkv.perf.peers.perftest import Test as PerfTest
from ucxkv.perf.peers.perftest import parse_results, render_tests, test_of
from ucxkv.perf.peers.rounds import ROUNDS, Operation, measure
from ucxkv.perf.plan import OPERATIONS, Plan, Shape, parse_names, parse_sizes, row_name
from ucxkv.perf.plot import check_plot, draw
from ucxkv.perf.product import measure_copies
from ucxkv.perf.report import FAILED, MISSING, Recorder, fit_columns, markdown, print_tables, report, tables

test_of.__test__ = False  # type: ignore[attr-defined]  # a function of ours, no test

MIB = 1 << 20
# What ucx_perftest of libucx 1.22.0 wrote with `-b FILE -v`, under load: test t3 took so long that it spoke twice.
UCX_1_22 = """\
batch2.txt,iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr
t0,2000,1.813,1.848,1.848,4.13,4.13,541131,541131
t1,1000,2.859,15.196,15.196,1028.23,1028.23,65807,65807
t2,1000,2.944,235.402,235.402,66.38,66.38,4248,4248
t3,[thread 0]  72,6593.125,7028.292,7028.292,8.89,8.89,142,142
t3,1000,8.082,118.953,616.426,525.42,101.39,8407,1622
"""
# Debian's ucx-utils 1.13.1, the same tests.
UCX_1_13 = """\
batch2.txt,iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr
t0,2000,0.020,0.024,0.024,312.20,312.20,40920039,40920039
t1,1000,0.275,142.388,142.388,109.74,109.74,7023,7023
t2,1000,2.964,23.204,23.204,673.38,673.38,43096,43096
t3,1000,7.016,165.900,165.900,376.73,376.73,6028,6028
"""
# A warning in between, and a session that ended after its first test.
CUT_SHORT = """\
[1796031369.616633] [vm:6361 :0]       uct_iface.c:92   UCX  WARN  got active message id 2, but no handler installed
batch,iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr
t0,  10,11173.937,11616.015,11616.015,5509.63,5509.63,86,86
[1796031369.616948] [vm:6361 :0]             log.c:658  UCX  WARN   0  libucs.so.0(ucs_log_print_backtrace+0x4d)
t1,10
"""
# Part of `ucx_info -d` of 1.22.0.
UCX_INFO = """\
#
# Memory domain: tcp
#     Component: tcp
#             register: unlimited, cost: 0 nsec
#
#      Transport: tcp
#         Device: eth0
#           Type: network
#  System device: <unknown>
#
#      Transport: tcp
#         Device: lo
#  System device: <unknown>
#
# Memory domain: posix
#      Transport: posix
#         Device: memory
"""


# ---- parsing


def test_results_of_ucx_perftest_are_found_by_their_columns() -> None:
    """Goal: the right numbers of several versions. Method: recorded texts; medians, message rates, counts."""
    new, old = parse_results(UCX_1_22), parse_results(UCX_1_13)
    assert new == {
        0: (1.813, 541131.0, 2000),
        1: (2.859, 65807.0, 1000),
        2: (2.944, 4248.0, 1000),
        3: (8.082, 1622, 1000),
    }
    assert old[0] == (0.020, 40920039.0, 2000)
    assert sorted(old) == [0, 1, 2, 3]


def test_what_is_no_result_of_ucx_perftest_is_passed_over() -> None:
    """Goal: a log line or a cut line is no figure. Method: a text with both, an empty one, columns in another order."""
    assert parse_results(CUT_SHORT) == {0: (11173.937, 86.0, 10)}
    assert parse_results("") == {}
    assert parse_results("Waiting for connection...\n") == {}
    assert parse_results("x,overall_mr,typical_lat,iterations\nt4,9,1.5,7\n") == {4: (1.5, 9.0, 7)}


def test_tasks_become_the_matching_tests() -> None:
    """Goal: each row stands beside the test that does the same. Method: operations alone and many at a time."""
    names = {op: test_of(Task(op, 4096), "shm").name for op in ("get", "put", "am", "tag")}
    assert names == {"get": "ucp_get", "put": "ucp_put_lat", "am": "ucp_am_lat", "tag": "tag_lat"}
    names = {op: test_of(Task(op, 4096, at_once=8), "net").name for op in ("get", "put", "am", "tag")}
    assert names == {"get": "ucp_get", "put": "ucp_put_bw", "am": "ucp_am_bw", "tag": "tag_bw"}
    one, many = test_of(Task("get", 4096), "shm"), test_of(Task("get", 4096, batch=64), "shm")
    assert (one.window, many.window) == (1, 64)
    assert test_of(Task("am", 4096), "shm").window == 0
    assert test_of(Task("get", 64 * MIB, budget_s=0.08), "net").iterations == 4
    assert test_of(Task("get", 8, budget_s=9.0), "shm").iterations == 20_000


def test_a_batch_file_holds_only_tests_of_ours() -> None:
    """Goal: nothing but numbers and known names reaches the other machine's command line. Method: good and bad ones."""
    good = PerfTest("ucp_get", 4096, 8, 100, 10)
    assert render_tests([good]) == "t0 -t ucp_get -s 4096 -n 100 -w 10 -O 8 -m host,host\n"
    for bad in (
        PerfTest("ucp_get -b /etc/passwd", 8, 1, 1, 1),
        PerfTest("ucp_get", "8 -x", 1, 1, 1),  # type: ignore[arg-type]
        PerfTest("ucp_get", 8, 1, -1, 1),
        PerfTest("ucp_get", 8, 1, 1, 1, "host -l"),
        PerfTest("ucp_get", 8, True, 1, 1),
    ):
        with pytest.raises(ValueError, match="no test"):
            render_tests([bad])


def test_transports_and_devices_are_read_from_ucx_info() -> None:
    """Goal: exactly what UCX has. Method: a recorded text."""
    assert parse_devices(UCX_INFO) == [("tcp", "eth0"), ("tcp", "lo"), ("posix", "memory")]
    assert parse_devices("") == []


def test_the_machine_says_what_figures_depend_on() -> None:
    """Goal: UCX's version, transports, devices, governor, pages, cores, kernel. Method: this machine's facts."""
    facts = machine_facts()
    assert re.fullmatch(r"\d+\.\d+\.\d+", facts["ucx"])
    assert {"self", "tcp"} <= set(facts["transports"])
    assert "lo" in facts["devices"]
    wanted = {"cpu", "cores", "cpu_governor", "kernel", "thp", "thp_shmem", "huge_pages", "ucx_path", "ucx_environment"}
    assert wanted <= facts.keys()
    assert json.loads(json.dumps(facts)) == facts


# ---- plans


def test_sizes_are_lists_and_ranges() -> None:
    """Goal: 8 B to 64 MiB in one word. Method: lists, units, a range with its end; duplicates once."""
    assert parse_sizes("8,16KiB, 1MiB") == (8, 16384, MIB)
    assert parse_sizes("8:64MiB:x8") == (*[8 * 8**i for i in range(8)], 64 * MIB)
    assert parse_sizes("1KiB:4KiB:x2,1KiB") == (1024, 2048, 4096)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0", "0 bytes"),
        ("7", "7 bytes"),
        ("12", "12 bytes"),
        ("2GiB", "bytes"),
        ("1G", "1G"),
        ("", "no size"),
        ("8:64MiB", "range"),
        ("8:64MiB:x1", "range"),
        ("8:64MiB:8", "range"),
        ("64:8:x2", "grow"),
        ("0:8:x2", "grow"),
        (",".join(str(8 * i) for i in range(1, 90)), "more than"),
    ],
)
def test_bad_sizes_are_refused_by_their_text(text: str, said: str) -> None:
    """Goal: a typed error that names it. Method: sizes that cannot be measured, ranges that are none."""
    with pytest.raises(UsageError, match=re.escape(said)):
        parse_sizes(text)


def test_unknown_names_are_refused_with_the_known() -> None:
    """Goal: a misspelt backend is no silent absence. Method: one wrong among right ones, none, all."""
    with pytest.raises(UsageError, match="'ucxy' is unknown; use ucxkv, ucx_perftest"):
        parse_names("--backend", "ucxkv,ucxy", tuple(BACKENDS))
    with pytest.raises(UsageError, match="nothing named"):
        parse_names("--op", " , ", OPERATIONS)
    assert parse_names("--op", "all", OPERATIONS) == OPERATIONS
    assert parse_names("--op", "put,get,put", OPERATIONS) == ("put", "get")


def test_interpreters_are_programs_for_foreign_backends(tmp_path: Path) -> None:
    """Goal: a wrong --python is told at once. Method: this interpreter, then wrong names and files."""
    assert parse_interpreters([f"ucxx={sys.executable}"]) == {"ucxx": sys.executable}
    (tmp_path / "text").write_text("")
    for text in (
        f"ucxkv={sys.executable}",
        "ucxx",
        "ucxx=",
        "ucxx=/does/not/exist",
        f"ucxx={tmp_path}/text",
        "x=/bin/sh",
    ):
        with pytest.raises(UsageError, match="--python"):
            parse_interpreters([text])


def test_hosts_have_a_default_port() -> None:
    """Goal: `--connect HOST[:PORT]`. Method: with and without a port, IPv6, what is none."""
    assert str(parse_host("--connect", "node7")) == f"node7:{DEFAULT_PORT}"
    assert str(parse_host("--connect", "10.0.0.1:99")) == "10.0.0.1:99"
    assert str(parse_host("--connect", "[::1]:99")) == "[::1]:99"
    for text in ("", "a b", "host:70000", "unix:@x", "1.2.3"):
        with pytest.raises(UsageError, match="--connect"):
            parse_host("--connect", text)


def _plan(**fields: Any) -> Plan:
    known: dict[str, Any] = {"operations": OPERATIONS, "sizes": (8,), "backends": ("ucxkv",), "paths": ("auto",)}
    return Plan(**{**known, **fields})


def test_shapes_are_single_then_batched_then_at_once() -> None:
    """Goal: the rows that a plan promises. Method: every operation's shapes and their names."""
    named = {op: [row_name(op, shape) for shape in _plan().shapes(op)] for op in OPERATIONS}
    assert named["get"] == ["get", "get_many", "get"]
    assert named["am"] == ["am", "am_stream"]
    assert named["look-up"] == ["look_up", "look_up_many"]
    assert _plan(batch=1, at_once=1).shapes("put") == [Shape()]


def test_large_blocks_are_fewer_and_working_sets_pass_the_cache() -> None:
    """Goal: 64 x 64 MiB does not fill the machine; reads come from memory unless asked otherwise. Method: sizes."""
    plan, batched = _plan(), Shape(batch=64)
    assert plan.fitted(MIB, batched) == batched
    assert plan.fitted(64 * MIB, batched) == Shape(batch=4)
    assert _plan(is_quick=True).fitted(64 * MIB, batched) == Shape(batch=2)
    assert plan.fitted(64 * MIB, Shape()) == Shape()
    for size in (8, 4096, MIB, 64 * MIB):
        fitted = plan.fitted(size, batched)
        blocks = plan.blocks(size, fitted, 32 * MIB)
        assert blocks >= fitted.batch
        assert blocks * size >= 96 * MIB or (size < 4096 and blocks == 4096)
        assert _plan(cache="hot").blocks(size, fitted, 32 * MIB) == fitted.batch


def test_a_wire_is_the_same_for_every_backend_and_yields_to_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: UCX_TLS beside a path is that of ucxkv's client. Method: wires of paths; what is set already stays."""
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert [wires.wire_of(path, is_same_host=True) for path in ("auto", "rma", "network")] == ["shm", "shm", "net"]
    assert wires.wire_of("auto", is_same_host=False) == "net"
    assert wires.environment("ucxx", "shm", "127.0.0.1")["UCX_TLS"] == "posix,cma,self"
    net = wires.environment("ucxx", "net", "127.0.0.1")
    assert (net["UCX_TLS"], net["UCX_NET_DEVICES"], net["UCX_TCP_TX_SEG_SIZE"]) == ("tcp,self", "lo", "256k")
    assert wires.environment("ucxx", "net", "10.0.0.1")["UCX_TLS"] == "^shm"
    assert "UCX_NET_DEVICES" not in wires.environment("ucxx", "net", "10.0.0.1")
    monkeypatch.setenv("UCX_TLS", "tcp,self,sysv")
    assert "UCX_TLS" not in wires.environment("ucxx", "shm", "127.0.0.1")


# ---- measuring


class _Counted(Operation):
    """Calls of a millisecond that remember how they were asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.checked = 0

    async def prepare(self, calls: int) -> None:
        self.asked.append(calls)

    async def operate(self) -> list[int]:
        times = []
        for _ in range(self.asked[-1]):
            start = time.perf_counter_ns()
            while time.perf_counter_ns() < start + 1_000_000:
                pass
            times.append(time.perf_counter_ns() - start)
        return times

    async def check(self) -> None:
        self.checked += 1


async def test_rounds_fit_their_budget_and_count_the_server() -> None:
    """Goal: a slow operation is called seldom, a warm-up is no sample, every round is verified. Method: calls of 1 ms
    within 50 ms; a server's clock that moves 7 ns a reading."""
    operation, clock = _Counted(), iter(range(0, 10_000, 7))

    async def server_cpu() -> int:
        return next(clock)

    result = await measure(operation, Task("get", 8, count=1000, budget_s=0.05), server_cpu)
    assert operation.asked[:2] == [1, 4]
    assert len(result.rounds) == ROUNDS
    assert 1 <= operation.asked[-1] <= 10
    assert result.samples == ROUNDS * operation.asked[-1] == sum(map(len, result.rounds))
    assert result.cpu_server_ns == 7 * ROUNDS
    assert result.wall_ns >= result.samples * 1_000_000
    assert operation.checked == len(operation.asked)
    small = _Counted()
    await measure(small, Task("get", 8, batch=4, count=8, budget_s=1.0), server_cpu)
    assert max(small.asked) == 2  # no block twice in a round


async def test_a_cancel_is_heard_between_two_rows_of_copies() -> None:
    """Goal: Ctrl-C ends `ucxkv perf` soon. Method: a plan of two sizes, cancelled when it has its first row."""
    recorder = Recorder(lambda what, steps: None)
    plan = _plan(sizes=(4096, 8192), operations=("get",), backends=("memcpy",), cache="hot", batch=1, is_quick=True)
    copying = asyncio.create_task(measure_copies(plan, recorder))
    await asyncio.sleep(0)
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert [row["bytes"] for row in recorder.rows] == [4096]


@pytest.mark.parametrize("nbytes", [8, 4096, (1 << 21) + 8, 5 * MIB])
def test_one_wrong_byte_anywhere_is_noticed(nbytes: int) -> None:
    """Goal: verification can fail. Method: blocks of a pattern with one byte changed, at the ends and inside."""
    pattern, block = Pattern(nbytes), anonymous_blocks(1, nbytes)[0]
    pattern.fill(41, block)
    assert pattern.matches(41, block)
    assert pattern.number_of(block) == 41
    assert not pattern.matches(42, block)
    for place in {0, nbytes // 2, nbytes - 1}:
        block[place] ^= 0x40
        assert not pattern.matches(41, block)
        block[place] ^= 0x40
    assert not pattern.matches(41, block[: nbytes - 8])


async def _nobody() -> int:
    return 0


@pytest.mark.parametrize("op", ["get", "put"])
async def test_a_socket_server_with_a_flipped_bit_is_caught(op: str) -> None:
    """Goal: bytes of gets and of puts are compared. Method: a real server in this process; a right exchange, then one
    bit of its pool is flipped before a get, or after a put."""
    from ucxkv.perf.peers import sockets

    server, client = sockets._SocketServer(), sockets._SocketClient()
    await client.start(Config("socket"), await server.start(Config("socket")))
    assert client._socket is not None
    with client._socket:
        task = Task(op, 4096, batch=2, count=4, budget_s=0.01)
        assert (await client.measure_one(task, _nobody)).verified
        exchange = sockets._Exchange(client._socket, task)
        await exchange.prepare(2)
        if op == "put":
            await exchange.operate()
        server._pool[3, 2048] ^= 1
        if op == "get":
            await exchange.operate()
        with pytest.raises(WrongBytes, match="other bytes"):
            await exchange.check()


# ---- reports


def _row(backend: str, op: str, path: str, nbytes: int, us: float, **more: Any) -> dict[str, Any]:
    wire = {"memcpy": "copy"}.get(backend, "net" if path in ("network", "net") else "shm")
    row = {"bench": "perf", "backend": backend, "op": op, "path": path, "wire": wire, "over": "x", "bytes": nbytes}
    row |= {"batch": 1, "concurrency": 1, "p50_us": us, "p99_us": us * 3, "gbps": nbytes / us / 1e3, "samples": 10}
    return row | more


def _report() -> dict[str, Any]:
    recorder = Recorder(lambda what, steps: None)
    for nbytes in (8, 4096, MIB):
        for backend, path in (("memcpy", "copy"), ("ucxkv", "mapped"), ("ucxkv", "network"), ("socket", "net")):
            recorder.rows.append(_row(backend, "get", path, nbytes, 1 + nbytes / 5000))
        recorder.rows.append(_row("ucxkv", "get_many", "mapped", nbytes, 3.0, batch=64))
        recorder.rows.append(_row("ucxx", "am", "shm", nbytes, 45.0, cpu_client_s_per_gb=1.0, cpu_server_s_per_gb=2.0))
    look_up = _row("ucxkv", "look_up", "mapped", 8, 2.0, keys_s=500_000)
    del look_up["bytes"], look_up["gbps"]
    recorder.rows.append(look_up)
    recorder.note("ucx-py", MISSING, "not installed: <conda>")
    recorder.note("ucx-py", MISSING, "not installed: <conda>")
    machine = {"cpu": "A & B", "cores": 2, "kernel": "6", "ucx": "1.22.0", "transports": ["tcp"]}
    conditions = {"other_cpus": 0.0, "stolen_cpus": 0.0}
    facts = {"ucxkv": "0", "command": "ucxkv perf", "machine": machine, "server": None, "conditions": conditions}
    return report(recorder, **facts)


def test_tables_have_sizes_down_and_backends_across() -> None:
    """Goal: rows that belong together stand together. Method: a recorded report's tables; notices once."""
    found = _report()
    by_title = {title: (columns, lines) for title, columns, lines in tables(found["rows"])}
    columns, lines = by_title["get, one at a time: p50 / p99, us"]
    assert columns == ["block", "memcpy", "ucxkv\nmapped", "ucxkv\nnetwork", "socket\nnet"]
    assert [line[0] for line in lines] == ["8 B", "4 KiB", "1 MiB"]
    assert lines[0][1] == "1.00 / 3.00"
    assert by_title["look-ups"][1] == [["look_up", "mapped", "1", "2.00 / 6.00", "500,000"]]
    assert found["notices"] == [{"backend": "ucx-py", "state": MISSING, "text": "not installed: <conda>"}]
    recorder = Recorder(lambda what, steps: None)
    assert not recorder.has_failed
    recorder.note("ucxx", FAILED, "x")
    assert recorder.has_failed


def test_a_table_is_cut_where_the_terminal_ends() -> None:
    """Goal: nothing is cropped on 80 columns. Method: columns of known widths; every one is shown, the first always."""
    columns, lines = ["block", "a" * 20, "b" * 20, "c\n" + "c" * 20, "d"], [["8 B", "1", "2", "3", "4" * 30]]
    assert fit_columns(columns, lines, 200) == [[0, 1, 2, 3, 4]]
    assert fit_columns(columns, lines, 60) == [[0, 1, 2], [0, 3], [0, 4]]
    assert fit_columns(columns, lines, 10) == [[0, 1], [0, 2], [0, 3], [0, 4]]


def test_tables_are_printed_with_notices_and_facts(capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: a terminal shows all of it. Method: a recorded report, printed."""
    print_tables(_report())
    said = capsys.readouterr().out
    for text in ("get, one at a time", "1.00 / 3.00", "ucx-py: missing: not installed: <conda>", "ucx 1.22.0", "A & B"):
        assert text in said


def test_tables_are_markdown_too() -> None:
    """Goal: a report can be pasted into a document. Method: a recorded report; each table's lines have equal cells."""
    text = markdown(_report())
    assert "| block | memcpy | ucxkv mapped | ucxkv network | socket net |" in text
    for table in text.split("\n\n"):
        if table.startswith("|"):
            assert len({line.count("|") for line in table.splitlines()}) == 1
    assert "ucx-py: missing: not installed: <conda>" in text


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]


def test_plots_are_a_picture_and_a_page_of_its_own(tmp_path: Path) -> None:
    """Goal: valid files that need nothing else. Method: the PNG's pixels are not all alike; the page's links lead into
    itself, its text is escaped."""
    from matplotlib.image import imread

    picture, page = tmp_path / "out.png", tmp_path / "out.html"
    draw(_report(), picture)
    pixels = np.asarray(imread(picture))
    assert pixels.shape[0] > 500
    assert pixels.shape[1] > 1000
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 50
    draw(_report(), page)
    parser = _Page()
    parser.feed(page.read_text())
    assert {"svg", "table", "style"} <= set(parser.tags)
    assert all(link.startswith("#") for link in parser.links)
    text = page.read_text()
    assert "A &amp; B" in text
    assert "&lt;conda&gt;" in text


def test_a_plot_that_cannot_be_written_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: no minutes are lost. Method: a folder that is not there, matplotlib that is not, nothing to draw."""
    with pytest.raises(UsageError, match="does not exist"):
        check_plot(tmp_path / "nowhere" / "out.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SetupError, match=re.escape("ucxkv[plot]")):
        check_plot(tmp_path / "out.png")
    monkeypatch.undo()
    found = _report()
    found["rows"] = [row for row in found["rows"] if row["op"] == "look_up"]
    with pytest.raises(UsageError, match="look-ups"):
        draw(found, tmp_path / "out.png")


def test_every_backend_has_a_way_to_get_it_and_a_module_that_makes_both_sides() -> None:
    """Goal: no notice without advice, no name without code. Method: the table of backends and the modules it names."""
    import importlib

    for backend in BACKENDS.values():
        assert set(backend.operations) <= set(OPERATIONS)
        assert backend.note
        assert not backend.is_foreign or backend.how or backend.name == "socket"
        if backend.module:
            name = backend.module if "." in backend.module else f"ucxkv.perf.peers.{backend.module}"
            module = importlib.import_module(name)
            assert callable(module.make_server)
            assert callable(module.make_client)
    assert Path(find_perftest()).name == "ucx_perftest"
    assert Result().cpu_server_ns == -1
