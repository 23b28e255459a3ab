"""The broker's port: HTTP and the WebSocket stream. Decides nothing about data."""

from firn_node.server.app import Server, install_uvloop, serve
from firn_node.server.context import ServerSettings

__all__ = ["Server", "ServerSettings", "install_uvloop", "serve"]
