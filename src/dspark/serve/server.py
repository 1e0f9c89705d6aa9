"""The server's life: a port, a model behind it, signals, and an orderly end.
It must never load a model for a port that it cannot have, or end without telling those who wait.
"""

from __future__ import annotations

import logging
import signal
import socket
import ssl
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import uvicorn
from jinja2 import Environment, TemplateSyntaxError

from dspark.config import Config, ServerConfig
from dspark.engine.llm import LLM
from dspark.serve.app import create_app
from dspark.serve.http import set_up_logs
from dspark.serve.service import Service

log = logging.getLogger("dspark.serve")
LAST_WORDS = 5
"""Seconds that responses have to get out once nothing runs any more."""


class Server(uvicorn.Server):
    """uvicorn, which lets what runs finish before it closes."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("shutting down: %d answers are being made", self.service.num_open)
        await self.service.drain(self.service.config.shutdown_grace, hurry=lambda: self.force_exit)
        await super().shutdown(sockets)


def run(
    model: str,
    config: Config,
    *,
    progress: Any = None,
    ready: Callable[[str, Service], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. `ready` is told the address, once requests would be answered. Raises ValueError
    naming cause and cure for a port that is taken, a key file that is none, or a model that cannot be loaded."""
    settings = config.server
    set_up_logs(settings.log_format)
    listener = bind(settings.host, settings.port)
    try:
        tls = _tls(settings)
        _check_template(settings.chat_template)
        log.info("loading %s, and measuring what its passes cost where that is not known yet", model)
        llm = LLM(model, speculative_config=config.speculation, progress=progress, **_fields(config.engine))
        service = Service(llm, settings)
        try:
            server = make_server(service, tls)
            # uvicorn raises a signal again when it is done: the end was orderly, and says so by its exit code.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: setattr(server, "should_exit", True))
            if ready is not None:
                ready(address_of(listener, tls=bool(tls)), service)
            server.run(sockets=[listener])
        finally:
            service.close()
    finally:
        listener.close()


def make_server(service: Service, tls: Mapping[str, Any] = MappingProxyType({})) -> Server:
    """uvicorn over a service; `run(sockets=[...])` serves until it is told to stop."""
    settings = service.config
    config = uvicorn.Config(
        create_app(service),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_keep_alive=max(1, round(settings.keep_alive_timeout)),
        timeout_graceful_shutdown=LAST_WORDS,
        root_path=settings.root_path,
        **tls,
    )
    return Server(config, service)


def address_of(listener: socket.socket, *, tls: bool = False) -> str:
    """As a client writes it."""
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def bind(host: str, port: int) -> socket.socket:
    """A socket of that address. Raises ValueError where it is taken, or is none of this machine's."""
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(
            f"host={host!r} is not usable ({error.strerror}): give a name or address of this machine"
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ValueError(
            f"cannot listen on {host}:{port} ({error.strerror}): stop the server that does, or choose another --port"
        ) from None
    return listener


def _tls(settings: ServerConfig) -> dict[str, Any]:
    if settings.ssl_certfile is None:
        return {}
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        path = getattr(settings, name)
        try:
            if path is not None:
                open(path, "rb").close()
        except OSError as error:
            raise ValueError(f"{name}={path!r} cannot be read ({error.strerror}): give a PEM file") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
        if settings.ssl_ca_certs:
            context.load_verify_locations(settings.ssl_ca_certs)
    except ssl.SSLError as error:
        raise ValueError(
            f"ssl_certfile, ssl_keyfile or ssl_ca_certs is not usable ({error.reason}): give PEM files, and the key "
            "that belongs to the certificate"
        ) from None
    found: dict[str, Any] = {"ssl_certfile": settings.ssl_certfile, "ssl_keyfile": settings.ssl_keyfile}
    if settings.ssl_ca_certs:
        found |= {"ssl_ca_certs": settings.ssl_ca_certs, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return found


def _check_template(template: str | None) -> None:
    """Raises ValueError for a chat template that is none, before a model is loaded for it."""
    if template is not None:
        try:
            Environment().parse(template)
        except TemplateSyntaxError as error:
            raise ValueError(f"chat_template is no Jinja template ({error}, line {error.lineno}): mend it") from None


def _fields(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}
