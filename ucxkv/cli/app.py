"""The commands, and the one place that maps ucxkv's error tree to a line on stderr and an exit code."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from ucxkv.cli import data, doctor, drain, elect, explain, node, objects, perf, simulate, topo
from ucxkv.errors import SetupError, UcxKvError, Unavailable, UsageError

__all__ = ["app", "run"]

app = typer.Typer(
    name="ucxkv",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Stores the attention KV cache of LLM inference: run nodes, look into them, measure them.",
)
app.command("node")(node.node)
app.command("forget")(node.forget)
app.command("drain")(drain.drain)
app.command("elect")(elect.elect)
app.command("status")(data.status)
app.command("put")(data.put)
app.command("get")(data.get)
app.command("ls")(data.ls)
app.command("rm")(data.rm)
app.add_typer(objects.app, name="object")
app.command("explain")(explain.explain)
app.command("perf")(perf.perf)
app.command("doctor")(doctor.doctor)
app.command("topo")(topo.topo)
app.command("simulate")(simulate.simulate)


@app.command("version")
def version(as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """Print the version of ucxkv and of what it stands on."""
    from importlib import metadata

    import ucxkv

    versions = {"ucxkv": ucxkv.__version__, "python": sys.version.split()[0]}
    for name in ("numpy", "libucx-cu12", "msgspec", "xxhash"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    if as_json:
        print(json.dumps(versions))
    else:
        print("\n".join(f"{name} {number}" for name, number in versions.items()))


def run(arguments: list[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit code; never raises for an expected error."""
    try:
        app(args=arguments, prog_name="ucxkv")
    except SystemExit as exc:
        if exc.code is None or isinstance(exc.code, int):
            return exc.code or 0
        print(exc.code, file=sys.stderr)
        return 1
    except (SetupError, UsageError) as exc:
        print(f"ucxkv: {exc}", file=sys.stderr)
        return 2
    except Unavailable as exc:
        print(f"ucxkv: {exc}", file=sys.stderr)
        return 3
    except UcxKvError as exc:
        print(f"ucxkv: {exc}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has left; there is nobody to tell
        return 1
    return 0
