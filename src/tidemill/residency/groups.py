"""Process groups of one rank: made, parked while the rank sleeps, and revived."""

from torch.distributed import TCPStore  # type: ignore[attr-defined]

__all__ = ["open_rendezvous"]

_stores: dict[str, TCPStore] = {}


def open_rendezvous(host: str) -> str:
    """Start the store at which ranks meet, in this process, on any free port; `host:port`."""
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    address = f"{host}:{store.port}"
    _stores[address] = store
    return address
