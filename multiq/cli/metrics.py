"""``multiq metrics``: the numbers of the queues for Prometheus, without a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from multiq.terminal_escapes import safe

from .argument_types import QueueName
from .durations import Duration
from .exits import FAILED, OK
from .options import connection_option, traceback_option, verbose_option

if TYPE_CHECKING:
    from multiq.app import App
    from multiq.worker.monitoring.http_server import Address
    from multiq.worker.monitoring.prometheus import QueueCollector

_SHORTEST = 0.1  # seconds
_LONGEST = 60.0
_REPLY_SECONDS = 1.5  # seconds for the request and the reply, in addition to the timeout


@click.command(short_help="Show the queues' metrics, or serve them to Prometheus.")
@click.argument("queues", nargs=-1, type=QueueName(), metavar="[QUEUE...]")
@click.option("--http", metavar="[HOST]:PORT", help="Serve /metrics on this address, instead of printing once.")
@click.option(
    "--timeout",
    type=Duration(),
    default="5",
    metavar="TIME",
    help="How long to wait for the backend (5 s). After that, the page says multiq_up 0.",
)
@click.option(
    "--max-queues",
    type=click.IntRange(1, 10_000),
    default=200,
    metavar="N",
    help="Without QUEUE: the most queues (200).",
)
@connection_option
@verbose_option
@traceback_option
def metrics(queues: tuple[str, ...], http: str | None, timeout: float, max_queues: int) -> int:
    """Print the numbers of all queues, or of the named queues, in the format of Prometheus.

    \b
      multiq metrics > /var/lib/node_exporter/multiq.prom
      multiq metrics --http :9100

    Without --http, the exit code is 1 if the backend did not answer in time. Needs the extra multiq[metrics].
    """
    from multiq.errors import OptionInvalid
    from multiq.worker.monitoring.http_server import check_libraries, parse_address

    from .apps import open_app

    if not _SHORTEST <= timeout <= _LONGEST:
        raise OptionInvalid(f"--timeout must be from {_SHORTEST:g} to {_LONGEST:g} seconds, got {timeout:g}")
    address = None if http is None else parse_address(http)
    check_libraries()
    with open_app() as app:
        collector = _collector(app, queues, max_queues, timeout)
        if address is not None:
            _serve(collector, address, timeout)
            return OK
        click.echo(collector.text().decode(), nl=False)
        if collector.is_up:
            return OK
        click.secho(f"error: {safe(collector.error)}", fg="red", err=True)
        return FAILED


def _collector(app: App, queues: tuple[str, ...], most: int, patience: float) -> QueueCollector:
    from multiq.worker.monitoring.prometheus import QueueCollector

    return QueueCollector(app.backend, queues, most=most, patience=patience)


def _serve(collector: QueueCollector, address: Address, timeout: float) -> None:
    from multiq.logging import setup_logging
    from multiq.worker.monitoring.http_server import Pages, Server, listen

    from .end_signals import EndSignals
    from .framework_app import current_settings

    log = current_settings().log
    setup_logging(log.level, log.format, over_app=False)
    pages = Pages(None, collector.text, (address.host,))
    with EndSignals() as ended:
        server = Server(listen(address), pages, seconds=timeout + _REPLY_SECONDS)
        ended.wait()
        server.close()
