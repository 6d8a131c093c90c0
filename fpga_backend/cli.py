"""The command `heteroreason fpga`."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="The FPGA core: what a model costs on it.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """The FPGA core: what a model costs on it."""


@app.command()
def report(
    model: Annotated[
        str, typer.Argument(help="A folder with an integer model, zoo/draft, qwen2.5-0.5b or qwen2.5-0.5b-w4")
    ] = "zoo/draft",
    board: Annotated[str, typer.Option(help="kv260, zcu104 or u280")] = "kv260",
    position: Annotated[int, typer.Option(help="Tokens that are in the cache already")] = 100,
    clock_mhz: Annotated[float, typer.Option(help="Clock, instead of the board's assumed one; 0: leave it")] = 0.0,
    latency: Annotated[int, typer.Option(help="Cycles of memory latency, instead of the board's; 0: leave it")] = 0,
) -> None:
    """Cycles of a token by unit, utilisation, bandwidth and resources. All modelled; nothing here ran on a board."""
    from fpga_backend.report import report_text

    typer.echo(report_text(model, board, position, clock_mhz, latency))
